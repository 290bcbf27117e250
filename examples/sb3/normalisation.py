"""Normalise observations and rewards, and use the statistics again with the saved model."""

import gymnasium

from unidle.sb3 import PPO
from unidle.sb3.common.evaluation import evaluate_policy
from unidle.sb3.common.vec_env import DummyVecEnv, VecNormalize


def make_env():
    return gymnasium.make("Pendulum-v1")


vec_env = VecNormalize(DummyVecEnv([make_env, make_env]), clip_obs=10.0, gamma=0.9)
model = PPO("MlpPolicy", vec_env, n_steps=128, gamma=0.9, learning_rate=1e-3, seed=1)
model.learn(total_timesteps=50_000)
model.save("pendulum")
vec_env.save("statistics.pkl")

vec_env = VecNormalize.load("statistics.pkl", DummyVecEnv([make_env]))
vec_env.training = vec_env.norm_reward = False
model = PPO.load("pendulum")
mean, _ = evaluate_policy(model, vec_env, n_eval_episodes=2, warn=False)
print(f"return {mean:.0f}")
