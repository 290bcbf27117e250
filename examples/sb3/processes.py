"""Environments in several processes."""

from unidle.sb3 import PPO
from unidle.sb3.common.env_util import make_vec_env
from unidle.sb3.common.vec_env import SubprocVecEnv

if __name__ == "__main__":
    vec_env = make_vec_env("Acrobot-v1", n_envs=4, seed=1, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", vec_env, n_steps=64, batch_size=64, n_epochs=4)
    model.learn(total_timesteps=50_000)
    observations = vec_env.reset()
    actions, _ = model.predict(observations)
    print(f"{len(actions)} actions for {vec_env.num_envs} environments")
    vec_env.close()
