"""Does unidle learn as well as Stable-Baselines3? The same PPO hyper-parameters, steps and seeds on both sides.

    python benchmarks/learning.py [--envs CartPole-v1 …] [--seeds 10] [--jobs 2]

Runs that are already in benchmarks/results/learning.json for the same settings are not repeated.
The policy at the end of training (not the best one) is evaluated with the mode action in the same 50 episodes on both
sides. "No worse" means: the lower 95 % bound of the difference between the inter-quartile means over seeds (unidle −
SB3; bootstrap, both sides resampled independently) lies above −5 % of (SB3 − random policy).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

# Hyper-parameters under their names in Stable-Baselines3; all others are its defaults, on both sides.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "timesteps": 100_000,
        "n_envs": 8,
        "ppo": {
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "learning_rate": 1e-3,
        },
        "linear": True,
    },
    "Acrobot-v1": {
        "timesteps": 200_000,
        "n_envs": 16,
        "ppo": {"n_steps": 256, "batch_size": 128, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94},
        "linear": False,
    },
    "Pendulum-v1": {
        "timesteps": 150_000,
        "n_envs": 4,
        "ppo": {
            "n_steps": 1024,
            "batch_size": 64,
            "n_epochs": 10,
            "gamma": 0.9,
            "gae_lambda": 0.95,
            "learning_rate": 1e-3,
        },
        "linear": False,
    },
    # rl-zoo's settings, with state-dependent exploration. unidle's unit of an action is half its range, 2 here; SB3's
    # is the environment's. A standard deviation of ½ in unidle is 1 in SB3, so both start with the same noise.
    "Pendulum-v1 gsde": {
        "timesteps": 100_000,
        "n_envs": 4,
        "ppo": {
            "n_steps": 1024,
            "batch_size": 64,
            "n_epochs": 10,
            "gamma": 0.9,
            "gae_lambda": 0.95,
            "learning_rate": 1e-3,
            "use_sde": True,
            "sde_sample_freq": 4,
        },
        "unidle_only": {"log_std_init": -0.6931},
        "linear": False,
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
        "linear": False,
    },
}
EVALUATION_EPISODES = 50
RESAMPLES = 20_000


def train_unidle(name: str, seed: int) -> float:
    """Train with unidle; return the mean return of the final policy."""
    import unidle
    from unidle.engine.agent import read_agent

    env_id, task = name.split()[0], TASKS[name]
    settings = {**task["ppo"], "n_envs": task["n_envs"], "timesteps": task["timesteps"]}
    settings |= task.get("unidle_only", {})
    if task["linear"]:
        settings |= {"lr_schedule": "linear", "clip_schedule": "linear"}
    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            env=env_id,
            preset="classic",
            seed=seed,
            runs_dir=folder,
            eval_every=0,
            tensorboard=False,
            device="cpu",
            subproc=False,  # the cores are busy with other runs
            quiet=True,
            **settings,
        )
        latest = run.folder.latest()
        assert latest is not None
        agent = read_agent(latest, run.config, None)
    return evaluate(env_id, agent.predict)


def train_sb3(name: str, seed: int) -> float:
    """Train with SB3; return the mean return of the final policy."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    env_id, task = name.split()[0], TASKS[name]
    settings = dict(task["ppo"])
    if task["linear"]:
        rate = settings.get("learning_rate", 3e-4)
        settings |= {"learning_rate": lambda left: left * rate, "clip_range": lambda left: left * 0.2}
    model = PPO("MlpPolicy", make_vec_env(env_id, task["n_envs"], seed=seed), seed=seed, device="cpu", **settings)
    model.learn(task["timesteps"])
    return evaluate(env_id, lambda observation: model.predict(observation, deterministic=True)[0])


def random_policy(env_id: str) -> float:
    """Mean return of uniformly random actions."""
    import gymnasium

    space = gymnasium.make(env_id).action_space
    space.seed(0)
    return evaluate(env_id, lambda _: space.sample(), episodes=100)


def evaluate(env_id: str, act: Any, episodes: int = EVALUATION_EPISODES) -> float:
    """Mean return over episodes with fixed seeds, the same for every policy."""
    import gymnasium

    env = gymnasium.make(env_id)
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1_000_000 + episode)
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total += float(reward)
            ended = bool(terminated or truncated)
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def iqm(values: np.ndarray) -> np.ndarray:
    """Inter-quartile mean along the last axis: the mean of the middle half, end points weighted by their share."""
    ordered = np.sort(values, -1)
    n = ordered.shape[-1]
    edges = np.arange(n + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0, None)
    return np.asarray(ordered @ weights / weights.sum())


def compare(returns: list[float], baseline: list[float], random: float) -> dict[str, Any]:
    """Compare the returns of unidle and of the baseline in one environment, one value per seed."""
    rng = np.random.default_rng(0)
    a, b = np.array(returns), np.array(baseline)
    resampled_a = a[rng.integers(0, len(a), (RESAMPLES, len(a)))]
    resampled_b = b[rng.integers(0, len(b), (RESAMPLES, len(b)))]
    lower = float(np.percentile(iqm(resampled_a) - iqm(resampled_b), 2.5))
    margin = -0.05 * (float(iqm(b)) - random)
    return {
        "unidle_iqm": float(iqm(a)),
        "sb3_iqm": float(iqm(b)),
        "random": random,
        "difference": float(iqm(a) - iqm(b)),
        "lower_95": lower,
        "margin": margin,
        "no_worse": bool(lower > margin),
    }


@contextlib.contextmanager
def new_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A new process for each run. If one fails, the runs that have not started are cancelled."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Train both sides, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    sides = {"unidle": train_unidle, "sb3": train_sb3}
    earlier = arguments.out / "learning.json"
    result: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"tasks": {}}
    with new_pool(arguments.jobs) as pool:
        for task in arguments.envs:
            row = result["tasks"].get(task, {})
            if any(row.get(name) != value for name, value in TASKS[task].items()):
                row = {**TASKS[task], "unidle": {}, "sb3": {}}
            result["tasks"][task] = row
            futures = {
                pool.submit(train, task, seed): (side, str(seed))
                for seed in range(1, arguments.seeds + 1)
                for side, train in sides.items()
                if str(seed) not in row[side]
            }
            for future in as_completed(futures):
                side, seed = futures[future]
                row[side][seed] = future.result()
                print(f"{task} {side} seed {seed}: {row[side][seed]:.1f}", file=sys.stderr, flush=True)
                save("learning", result, arguments.out)  # after each run: all of them take hours
            if futures:
                row["machine"] = provenance("stable-baselines3")  # a task without new runs keeps its own
            row |= compare(list(row["unidle"].values()), list(row["sb3"].values()), random_policy(task.split()[0]))
            save("learning", result, arguments.out)
    print_table(result)


def print_table(result: dict[str, Any]) -> None:
    """One line per environment."""
    heads = ("steps", "unidle", "SB3", "random", "lower 95 %", "margin")
    print(f"{'environment':<16}" + "".join(f"{head:>12}" for head in heads) + "  verdict")
    for env_id, row in result["tasks"].items():
        if "no_worse" not in row:
            print(f"{env_id:<16}{row['timesteps']:>12,}  not all seeds done")
            continue
        verdict = "no worse" if row["no_worse"] else "not shown"
        figures = (row["unidle_iqm"], row["sb3_iqm"], row["random"], row["lower_95"], row["margin"])
        print(f"{env_id:<16}{row['timesteps']:>12,}" + "".join(f"{x:>12.1f}" for x in figures) + f"  {verdict}")


if __name__ == "__main__":
    main()
