"""Train, save, load, evaluate, and play."""

import gymnasium

from unidle.sb3 import PPO
from unidle.sb3.common.evaluation import evaluate_policy

env = gymnasium.make("CartPole-v1")
model = PPO("MlpPolicy", env, n_steps=256, seed=1)
model.learn(total_timesteps=30_000)
model.save("cartpole")

model = PPO.load("cartpole", env=env)
mean, deviation = evaluate_policy(model, env, n_eval_episodes=10)
print(f"return {mean:.0f} ± {deviation:.0f}")

vec_env = model.get_env()
observations = vec_env.reset()
for _ in range(200):
    actions, _ = model.predict(observations, deterministic=True)
    observations, rewards, dones, infos = vec_env.step(actions)
