"""Do SAC, TD3 and DQN learn as well as in Stable-Baselines3? The same hyper-parameters, steps and seeds on both sides.

    python benchmarks/off_policy_learning.py [--tasks "Pendulum-v1 sac" …] [--seeds 10] [--jobs 2] [--judge]

Evaluated as in learning.py. SB3 has no prioritised replay: unidle with it is compared with SB3 without it.
Runs that are already in benchmarks/results/off_policy_learning.json for the same settings are not repeated.
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium
from run_queue import Result
from side_by_side import CHEAP, TrainingReturns, evaluate, main

_PENDULUM = {
    "timesteps": 10_000,
    "seeds": CHEAP,
    "unidle": {
        "n_envs": 4,
        "n_steps": 4,
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "buffer_size": 100_000,
    },
    "sb3": {
        "train_freq": 4,
        "gradient_steps": 16,
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "buffer_size": 100_000,
    },
}
# Not rl-zoo's settings: with those, the quality of the final policy is random on either side (a standard deviation of
# 170 over seeds), and ten seeds are inconclusive. The settings that make it stable were found with SB3 alone, on other
# seeds: 5-step returns, and a learning rate that falls to 0. SB3 updates its target network 4 times per 8 updates,
# unidle after each update; hence tau is 1 − (1 − 0.02)^½ in unidle. SB3's first 8 updates come after step 1008, the
# first multiple of 16 above 1000; unidle's after 992 + 16.
_CARTPOLE = {
    "timesteps": 50_000,
    "seeds": CHEAP,
    "unidle": {
        "n_envs": 4,
        "n_steps": 4,
        "utd_ratio": 0.5,
        "n_step": 5,
        "net_arch": [128, 128],
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "batch_size": 128,
        "buffer_size": 100_000,
        "learning_starts": 992,
        "target_update_interval": 1,
        "tau": 0.0100505,
        "double_dqn": False,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.05,
    },
    "sb3": {
        "train_freq": 4,
        "gradient_steps": 8,
        "n_steps": 5,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "batch_size": 128,
        "buffer_size": 100_000,
        "learning_starts": 1000,
        "target_update_interval": 1,
        "tau": 0.02,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.05,
        "policy_kwargs": {"net_arch": [128, 128]},
    },
}
# Chosen in the same way, starting from rl-zoo's learning rate, batch size and networks. Returns of single seeds have a
# standard deviation of 45, and 60 seeds left the bound at 5 % of the gain over random; 100 narrow the interval by a
# fifth.
_LUNAR_LANDER = {
    "timesteps": 200_000,
    "seeds": 100,
    "unidle": {
        "n_envs": 4,
        "n_steps": 4,
        "utd_ratio": 0.25,
        "n_step": 3,
        "net_arch": [256, 256],
        "learning_rate": 6.3e-4,
        "lr_schedule": "linear",
        "batch_size": 128,
        "buffer_size": 100_000,
        "learning_starts": 992,
        "target_update_interval": 1,
        "tau": 0.02,
        "double_dqn": False,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.05,
    },
    "sb3": {
        "train_freq": 4,
        "gradient_steps": 4,
        "n_steps": 3,
        "learning_rate": 6.3e-4,
        "lr_schedule": "linear",
        "batch_size": 128,
        "buffer_size": 100_000,
        "learning_starts": 1000,
        "target_update_interval": 1,
        "tau": 0.02,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.05,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
}
# The MuJoCo task whose return varies least between seeds after so few steps.
_REACHER = {
    "timesteps": 10_000,
    "unidle": {
        "n_envs": 4,
        "n_steps": 4,
        "utd_ratio": 0.5,
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "buffer_size": 100_000,
    },
    "sb3": {
        "train_freq": 4,
        "gradient_steps": 8,
        "learning_rate": 1e-3,
        "learning_starts": 1000,
        "buffer_size": 100_000,
    },
}

# rl-zoo's settings, with state-dependent exploration.
_MOUNTAIN_CAR = {
    "timesteps": 50_000,
    "unidle": {
        "n_envs": 1,
        "n_steps": 32,
        "learning_rate": 3e-4,
        "learning_starts": 0,
        "buffer_size": 50_000,
        "batch_size": 512,
        "ent_coef": 0.1,
        "gamma": 0.9999,
        "tau": 0.01,
        "use_sde": True,
        "use_expln": True,
        "log_std_init": -3.67,
        "net_arch": [64, 64],
    },
    "sb3": {
        "train_freq": 32,
        "gradient_steps": 32,
        "learning_rate": 3e-4,
        "learning_starts": 0,
        "buffer_size": 50_000,
        "batch_size": 512,
        "ent_coef": 0.1,
        "gamma": 0.9999,
        "tau": 0.01,
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -3.67, "net_arch": [64, 64], "use_expln": True},
    },
}


# rl-zoo's settings, with a quarter of its updates per step: a run of SB3 takes minutes, not the better part of an hour.
_MUJOCO = {
    "timesteps": 200_000,
    "unidle": {
        "n_envs": 4,
        "n_steps": 4,
        "utd_ratio": 0.25,
        "learning_rate": 3e-4,
        "learning_starts": 10_000,
        "buffer_size": 200_000,
    },
    "sb3": {
        "train_freq": 4,
        "gradient_steps": 4,
        "learning_rate": 3e-4,
        "learning_starts": 10_000,
        "buffer_size": 200_000,
    },
}


# TD3 uses SAC's settings with its own learning rate; its network (400, 300) is the default of both libraries.
def _td3(task: dict[str, Any]) -> dict[str, Any]:
    own = {"learning_rate": 1e-3, "exploration_noise": 0.1}
    return {**task, "unidle": {**task["unidle"], **own}, "sb3": {**task["sb3"], **own}}


def _prioritised(task: dict[str, Any]) -> dict[str, Any]:
    return {**task, "unidle": {**task["unidle"], "per": True}, "seeds": min(task.get("seeds", 10), CHEAP)}


TASKS: dict[str, dict[str, Any]] = {
    "Pendulum-v1 sac": _PENDULUM,
    "Pendulum-v1 sac prioritised": _prioritised(_PENDULUM),
    "CartPole-v1 dqn": _CARTPOLE,
    "CartPole-v1 dqn prioritised": _prioritised(_CARTPOLE),
    "LunarLander-v3 dqn": _LUNAR_LANDER,
    "LunarLander-v3 dqn prioritised": _prioritised(_LUNAR_LANDER),
    "Reacher-v5 sac": _REACHER,
    "Reacher-v5 sac prioritised": _prioritised(_REACHER),
    "MountainCarContinuous-v0 sac gsde": _MOUNTAIN_CAR,
    "Pendulum-v1 td3": _td3(_PENDULUM),
    "Reacher-v5 td3": _td3(_REACHER),
    "Hopper-v5 sac": _MUJOCO,
    "Hopper-v5 td3": _td3(_MUJOCO),
    "HalfCheetah-v5 sac": _MUJOCO,
    "HalfCheetah-v5 td3": _td3(_MUJOCO),
}


def make(name: str) -> gymnasium.Env:
    """The environment of a task."""
    return gymnasium.make(name.split()[0])


def train_unidle(name: str, seed: int, device: str) -> Result:
    """Train with unidle; return the mean return of the final policy."""
    import unidle
    from unidle.engine.agent import read_agent

    (env_id, algo), task = name.split()[:2], TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            env=env_id,
            algo=algo,
            seed=seed,
            timesteps=task["timesteps"],
            wrappers=("side_by_side:TrainingReturns",),
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=task["timesteps"],
            tensorboard=False,
            device=device,
            subproc=False,  # the cores are busy with other runs
            quiet=True,
            **task["unidle"],
        )
        latest = run.folder.latest()
        assert latest is not None
        agent = read_agent(latest, run.config, None)
    training = TrainingReturns.by_part(task["timesteps"] // task["unidle"]["n_envs"])
    return evaluate(make(name), agent.predict), training


def train_sb3(name: str, seed: int, device: str) -> Result:
    """Train with SB3; return the mean return of the final policy."""
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    (env_id, algo), task = name.split()[:2], TASKS[name]
    n_envs = task["unidle"]["n_envs"]
    env = make_vec_env(env_id, n_envs, seed=seed, wrapper_class=TrainingReturns)
    settings = dict(task["sb3"])
    rate = settings.pop("learning_rate")
    if settings.pop("lr_schedule", None) == "linear":
        settings["learning_rate"] = lambda left: left * rate
    else:
        settings["learning_rate"] = rate
    if "exploration_noise" in settings:
        n_actions = int(np.prod(env.action_space.shape or (1,)))
        sigma = settings.pop("exploration_noise") * np.ones(n_actions)
        settings["action_noise"] = NormalActionNoise(np.zeros(n_actions), sigma)
    model = getattr(stable_baselines3, algo.upper())("MlpPolicy", env, seed=seed, device=device, **settings)
    model.learn(task["timesteps"])
    training = TrainingReturns.by_part(task["timesteps"] // n_envs)
    # Evaluated on the CPU, as unidle's policy is: single observations gain nothing from a GPU.
    policy = model.policy.to("cpu")
    return evaluate(make(name), lambda observation: policy.predict(observation, deterministic=True)[0]), training


if __name__ == "__main__":
    main(__doc__, TASKS, {"unidle": train_unidle, "sb3": train_sb3}, make)
