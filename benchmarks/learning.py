"""Does unidle learn as well as Stable-Baselines3? The same PPO hyper-parameters, steps and seeds on both sides.

    python benchmarks/learning.py [--tasks CartPole-v1 …] [--seeds 10] [--jobs 2] [--seconds 500] [--judge]

Runs that are already in benchmarks/results/learning.json for the same settings are not repeated.
The policy at the end of training (not the best one) is evaluated with the mode action in the same 50 episodes on both
sides. "No worse" means: the lower 95 % bound of the difference between the inter-quartile means over seeds (unidle −
SB3; bootstrap, both sides resampled independently) lies above −2 % of (SB3 − random policy).
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium
from learning_envs import Catch, cartpole_without_velocities
from run_queue import Result
from side_by_side import CHEAP, TrainingReturns, evaluate, main

_PENDULUM = {
    "n_steps": 1024,
    "batch_size": 64,
    "n_epochs": 10,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "learning_rate": 1e-3,
}
_CARTPOLE = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "learning_rate": 1e-3,
}
# The network of rl-zoo's tuned MuJoCo tasks; the tasks of the settings named v4 there are v5 here.
_MUJOCO_POLICY = {"net_arch": [256, 256], "activation": "relu", "ortho_init": False, "log_std_init": -2.0}

# `ppo` has hyper-parameters under their names in Stable-Baselines3, and `policy` those of the network under their names
# in unidle; all others are the defaults of SB3, on both sides. With `linear`, learning rate and clip range fall to 0;
# with `normalize`, observations and rewards are divided by running statistics. `seeds`, fixed beforehand, is 10 unless
# it is given: 50 where a run takes a minute or two.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"timesteps": 100_000, "n_envs": 8, "ppo": _CARTPOLE, "linear": True, "seeds": CHEAP},
    "Acrobot-v1": {
        "timesteps": 200_000,
        "n_envs": 16,
        "seeds": CHEAP,
        "ppo": {"n_steps": 256, "batch_size": 128, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94},
    },
    "Pendulum-v1": {"timesteps": 150_000, "n_envs": 4, "ppo": _PENDULUM, "seeds": CHEAP},
    # rl-zoo's settings, with state-dependent exploration. unidle's unit of an action is half its range, 2 here; SB3's
    # is the environment's. A standard deviation of ½ in unidle is 1 in SB3, so both start with the same noise.
    "Pendulum-v1 gsde": {
        "timesteps": 100_000,
        "n_envs": 4,
        "seeds": CHEAP,
        "ppo": {**_PENDULUM, "use_sde": True, "sde_sample_freq": 4},
        "unidle_only": {"log_std_init": -0.6931},
    },
    "LunarLander-v3": {
        "timesteps": 1_000_000,
        "n_envs": 16,
        "ppo": {
            "n_steps": 1024,
            "batch_size": 64,
            "n_epochs": 4,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "ent_coef": 0.01,
        },
    },
    # From here on rl-zoo's settings, but for the number of steps.
    "HalfCheetah-v5": {
        "timesteps": 300_000,
        "n_envs": 1,
        "ppo": {
            "n_steps": 512,
            "batch_size": 64,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.92,
            "learning_rate": 2.0633e-05,
            "ent_coef": 0.000401762,
            "clip_range": 0.1,
            "max_grad_norm": 0.8,
            "vf_coef": 0.58096,
        },
        "policy": _MUJOCO_POLICY,
        "normalize": True,
    },
    "Hopper-v5": {
        "timesteps": 300_000,
        "n_envs": 1,
        "ppo": {
            "n_steps": 512,
            "batch_size": 32,
            "n_epochs": 5,
            "gamma": 0.999,
            "gae_lambda": 0.99,
            "learning_rate": 9.80828e-05,
            "ent_coef": 0.00229519,
            "clip_range": 0.2,
            "max_grad_norm": 0.7,
            "vf_coef": 0.835671,
        },
        "policy": _MUJOCO_POLICY,
        "normalize": True,
    },
    "Walker2d-v5": {
        "timesteps": 300_000,
        "n_envs": 1,
        "ppo": {
            "n_steps": 512,
            "batch_size": 32,
            "n_epochs": 20,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "learning_rate": 5.05041e-05,
            "ent_coef": 0.000585045,
            "clip_range": 0.1,
            "max_grad_norm": 1.0,
            "vf_coef": 0.871923,
        },
        "normalize": True,
    },
    "Ant-v5": {"timesteps": 300_000, "n_envs": 1, "ppo": {"gamma": 0.99}, "normalize": True},
    "BipedalWalker-v3": {
        "timesteps": 1_000_000,
        "n_envs": 32,
        "ppo": {
            "n_steps": 2048,
            "batch_size": 64,
            "n_epochs": 10,
            "gamma": 0.999,
            "gae_lambda": 0.95,
            "learning_rate": 3e-4,
            "clip_range": 0.18,
        },
        "normalize": True,
    },
    # rl-zoo's batch size is 256, of which SB3 makes the 8 steps of a rollout.
    "MountainCarContinuous-v0 gsde": {
        "timesteps": 20_000,
        "seeds": CHEAP,
        "n_envs": 1,
        "ppo": {
            "n_steps": 8,
            "batch_size": 8,
            "n_epochs": 10,
            "gamma": 0.9999,
            "gae_lambda": 0.9,
            "learning_rate": 7.77e-05,
            "ent_coef": 0.00429,
            "clip_range": 0.1,
            "max_grad_norm": 5.0,
            "vf_coef": 0.19,
            "use_sde": True,
        },
        "policy": {"log_std_init": -3.29, "ortho_init": False},
        "normalize": True,
    },
    "Catch": {
        "timesteps": 100_000,
        "n_envs": 8,
        "ppo": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "gamma": 0.99, "ent_coef": 0.01},
        "policy": {"net_arch": []},
    },
    # unidle's actor and critic share the LSTM, and both train it; in rl-zoo's settings each has its own.
    "CartPole-v1 without velocities": {
        "timesteps": 100_000,
        "n_envs": 8,
        "ppo": _CARTPOLE,
        "policy": {"net_arch": [64], "activation": "relu", "ortho_init": False},
        "unidle_only": {"recurrent": "lstm", "recurrent_size": 64},
        "sb3_policy": {"lstm_hidden_size": 64, "enable_critic_lstm": True},
        "linear": True,
        "normalize": True,
    },
}
_OURS = {"Catch": Catch, "CartPole-v1 without velocities": cartpole_without_velocities}


def make(name: str) -> gymnasium.Env:
    """The environment of a task."""
    return _OURS[name]() if name in _OURS else gymnasium.make(name.split()[0])


def train_unidle(name: str, seed: int, device: str) -> Result:
    """Train with unidle; return the mean return of the final policy."""
    import unidle
    from unidle.engine.agent import read_agent

    task = TASKS[name]
    settings = {**task["ppo"], **task.get("policy", {}), **task.get("unidle_only", {})}
    if task.get("linear"):
        settings |= {"lr_schedule": "linear", "clip_schedule": "linear"}
    if task.get("normalize"):
        settings |= {"normalize_obs": True, "normalize_reward": True}
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            env=_OURS.get(name, name.split()[0]),
            preset="classic",
            seed=seed,
            n_envs=task["n_envs"],
            timesteps=task["timesteps"],
            wrappers=("side_by_side:TrainingReturns",),
            runs_dir=folder,
            eval_every=0,
            tensorboard=False,
            device=device,
            subproc=False,  # the cores are busy with other runs
            quiet=True,
            **settings,
        )
        latest = run.folder.latest()
        assert latest is not None
        agent = read_agent(latest, run.config, None)
    training = TrainingReturns.by_part(task["timesteps"] // task["n_envs"])
    return evaluate(make(name), agent.predict, reset=agent.reset), training


def train_sb3(name: str, seed: int, device: str) -> Result:
    """Train with SB3; return the mean return of the final policy."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    task = TASKS[name]
    settings = dict(task["ppo"])
    if task.get("linear"):
        rate = settings.get("learning_rate", 3e-4)
        settings |= {"learning_rate": lambda left: left * rate, "clip_range": lambda left: left * 0.2}
    network = {**task.get("policy", {}), **task.get("sb3_policy", {})}
    if network.pop("activation", "tanh") == "relu":
        network["activation_fn"] = torch.nn.ReLU
    env = make_vec_env(lambda: make(name), task["n_envs"], seed=seed, wrapper_class=TrainingReturns)
    if task.get("normalize"):
        env = VecNormalize(env, gamma=task["ppo"].get("gamma", 0.99))
    algorithm, policy = PPO, "CnnPolicy" if len(env.observation_space.shape or ()) == 3 else "MlpPolicy"
    if "lstm_hidden_size" in network:
        from sb3_contrib import RecurrentPPO

        algorithm, policy = RecurrentPPO, "MlpLstmPolicy"
    model = algorithm(policy, env, seed=seed, device=device, policy_kwargs=network or None, **settings)
    model.learn(task["timesteps"])
    training = TrainingReturns.by_part(task["timesteps"] // task["n_envs"])
    player = _Player(model)
    return evaluate(make(name), player.act, reset=player.reset), training


class _Player:
    """Acts with a model of SB3, which needs normalised observations and gives back its recurrent state."""

    def __init__(self, model: Any) -> None:
        self._model, self._normalizer, self._state = model, model.get_vec_normalize_env(), None

    def reset(self) -> None:
        self._state = None

    def act(self, observation: Any) -> Any:
        if self._normalizer is not None:
            observation = self._normalizer.normalize_obs(observation)
        # Without a state, it is set to zero: that is a new episode.
        action, self._state = self._model.predict(observation, state=self._state, deterministic=True)
        return action


if __name__ == "__main__":
    main(__doc__, TASKS, {"unidle": train_unidle, "sb3": train_sb3}, make)
