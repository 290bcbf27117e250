"""Stable-Baselines3's own PPO with the settings of preset `beast`, as its users write it.

    unidle watch -- python benchmarks/sb3_beast.py [--seconds 40]

It prints no result itself; `unidle watch` reports what it waits for.
"""

from __future__ import annotations

import argparse
import time

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv


def main() -> None:
    """Train for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--n-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=40.0, help="of training, after the environments have started")
    arguments = parser.parse_args()
    envs = make_vec_env(arguments.env, n_envs=arguments.n_envs, vec_env_cls=SubprocVecEnv)
    layers = {"net_arch": [1024, 512, 512, 256]}
    model = PPO("MlpPolicy", envs, n_steps=512, batch_size=8192, n_epochs=30, policy_kwargs=layers)
    end = time.monotonic() + arguments.seconds
    model.learn(10**9, callback=lambda *_: time.monotonic() < end)
    envs.close()


if __name__ == "__main__":
    main()
