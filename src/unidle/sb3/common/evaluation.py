"""`evaluate_policy`: the mean return of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from unidle.envs.vector.vector_wrappers import layers
from unidle.errors import UsageError
from unidle.sb3.common.monitor import Monitor
from unidle.sb3.common.vec_env import DummyVecEnv
from unidle.sb3.theirs import name_of_theirs


def evaluate_policy(
    model: Any,
    env: Any,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    render: bool = False,
    callback: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    reward_threshold: float | None = None,
    return_episode_rewards: bool = False,
    warn: bool = True,
) -> Any:
    """Play `n_eval_episodes` episodes, divided evenly between the environments.

    Returns the mean and standard deviation of the returns, or the lists of returns and lengths with
    `return_episode_rewards`. Under a `Monitor`, only the episodes that it reports count: an Atari life is none. `warn`
    has no effect.
    """
    if isinstance(env, gymnasium.Env):
        single = env
        env = DummyVecEnv([lambda: single])
    n_envs: int = env.num_envs
    is_monitored = _is_monitored(env)
    remaining = np.array([(n_eval_episodes + index) // n_envs for index in range(n_envs)])
    returns, lengths = np.zeros(n_envs), np.zeros(n_envs, np.int64)
    episode_rewards: list[float] = []
    episode_lengths: list[int] = []
    state, starts = None, np.ones(n_envs, np.bool_)
    observations = env.reset()
    while remaining.any():
        actions, state = model.predict(observations, state=state, episode_start=starts, deterministic=deterministic)
        observations, rewards, dones, infos = env.step(actions)
        starts = np.asarray(dones, np.bool_)
        returns += rewards
        lengths += 1
        for index in np.flatnonzero(remaining):
            info, done = infos[index], bool(dones[index])
            if callback is not None:
                callback({"i": index, "info": info, "done": done, "reward": rewards[index], "env": env}, {})
            if done and (not is_monitored or "episode" in info):
                reported = info.get("episode", {"r": returns[index], "l": lengths[index]})
                episode_rewards.append(float(reported["r"]))
                episode_lengths.append(int(reported["l"]))
                remaining[index] -= 1
        returns[starts], lengths[starts] = 0.0, 0
        if render:
            env.render("human")
    if reward_threshold is not None and np.mean(episode_rewards) <= reward_threshold:
        raise UsageError(f"The mean return is {np.mean(episode_rewards):.2f}, not above {reward_threshold:.2f}.")
    if return_episode_rewards:
        return episode_rewards, episode_lengths
    return float(np.mean(episode_rewards)), float(np.std(episode_rewards))


def _is_monitored(env: Any) -> bool:
    """Whether a `Monitor` or `VecMonitor`, unidle's or Stable-Baselines3's, reports the episodes."""
    if any(type(layer).__name__ == "VecMonitor" for layer in layers(env)):
        return True
    theirs = sys.modules.get("stable_baselines3.common.monitor")
    kinds = [Monitor, *([theirs.Monitor] if theirs else [])]
    return any(env.env_is_wrapped(kind)[0] for kind in kinds)


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
