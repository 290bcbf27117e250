"""How many steps/s do DQN, SAC and TD3 make on a CPU, environments included? Against Stable-Baselines3.

    python benchmarks/off_policy_end_to_end.py [--tasks "CartPole-v1 dqn" …] [--rounds 1]

Both sides train with the same recipe and one environment: rl-zoo's settings for CartPole, and SB3's defaults elsewhere.
SB3 runs with torch's default number of threads, one per core, and with one, which is often faster; the ratio is to the
faster one. A part of the run is timed (`measured`), when actions are no longer random. unidle logs and saves
checkpoints as usual; neither side evaluates. The sides alternate, forwards and then backwards, each run in a
separate process; the result is the median. Use an otherwise idle machine. If other programs take its cores, compare
the CPU time per step of the sides with one thread (`--one-thread` measures only these).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

Mark = tuple[float, float]  # wall time, and CPU time of the process

# SB3's defaults.
_DQN = {
    "unidle": {
        "n_steps": 4,
        "utd_ratio": 0.25,
        "batch_size": 32,
        "learning_rate": 1e-4,
        "learning_starts": 100,
        "target_update_interval": 2500,  # updates; in SB3 steps
        "tau": 1.0,
        "net_arch": [64, 64],
        "double_dqn": False,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.05,
    },
    "sb3": {},
}
_ACTOR_CRITIC = {"unidle": {"n_steps": 1, "learning_starts": 100}, "sb3": {}}
_NOISE = 0.1  # standard deviation of TD3's exploration; SB3 has none by default
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1 dqn": {
        "timesteps": 50_000,
        "measured": (40 * 256, 80 * 256),
        "unidle": {
            "n_steps": 256,
            "utd_ratio": 0.5,
            "batch_size": 64,
            "learning_rate": 2.3e-3,
            "learning_starts": 1000,
            "buffer_size": 100_000,
            "target_update_interval": 5,  # updates; in SB3 10 steps
            "tau": 1.0,
            "net_arch": [256, 256],
            "double_dqn": False,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
        },
        "sb3": {
            "train_freq": 256,
            "gradient_steps": 128,
            "batch_size": 64,
            "learning_rate": 2.3e-3,
            "learning_starts": 1000,
            "buffer_size": 100_000,
            "target_update_interval": 10,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    },
    "LunarLander-v3 dqn": {"timesteps": 100_000, "measured": (10_000, 20_000), **_DQN},
    "Acrobot-v1 dqn": {"timesteps": 100_000, "measured": (10_000, 20_000), **_DQN},
    "Pendulum-v1 sac": {"timesteps": 20_000, "measured": (500, 1_500), **_ACTOR_CRITIC},
    "HalfCheetah-v5 sac": {"timesteps": 1_000_000, "measured": (500, 1_500), **_ACTOR_CRITIC},
    "Pendulum-v1 td3": {
        "timesteps": 20_000,
        "measured": (500, 1_500),
        "unidle": {**_ACTOR_CRITIC["unidle"], "exploration_noise": _NOISE},
        "sb3": {"action_noise": _NOISE},
    },
}


def train_unidle(name: str) -> dict[str, float]:
    """Train with unidle; return steps per second and CPU time per step."""
    import unidle

    (env_id, algo), task = name.split(), TASKS[name]
    marks: list[Mark] = []

    def mark(context: Any) -> None:
        if context.record["step"] in task["measured"]:
            marks.append(_mark())
        if len(marks) == 2:
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            env=env_id,
            algo=algo,
            n_envs=1,
            timesteps=task["timesteps"],
            runs_dir=folder,
            eval_every=0,
            device="cpu",
            quiet=True,
            after_iteration=[mark],
            **task["unidle"],
        )
    return _speed(marks, task)


def train_sb3(name: str, *, threads: int | None = None) -> dict[str, float]:
    """Train with SB3; return steps per second and CPU time per step."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    (env_id, algo), task = name.split(), TASKS[name]
    marks: list[Mark] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps in task["measured"]:
                marks.append(_mark())
            return len(marks) < 2

    if threads is not None:
        torch.set_num_threads(threads)
    env, settings = make_vec_env(env_id), dict(task["sb3"])
    if "action_noise" in settings:
        sigma = np.full(env.action_space.shape or (), settings["action_noise"])
        settings["action_noise"] = NormalActionNoise(np.zeros_like(sigma), sigma)
    model = getattr(stable_baselines3, algo.upper())("MlpPolicy", env, device="cpu", **settings)
    model.learn(task["timesteps"], callback=Watch())
    return _speed(marks, task)


SIDES: dict[str, Callable[[str], dict[str, float]]] = {
    "sb3": train_sb3,
    "sb3, 1 thread": partial(train_sb3, threads=1),
    "unidle": train_unidle,
}


def _mark() -> Mark:
    return time.perf_counter(), time.process_time()


def _speed(marks: list[Mark], task: dict[str, Any]) -> dict[str, float]:
    (began, cpu_before), (ended, cpu_after) = marks
    steps = task["measured"][1] - task["measured"][0]
    return {"steps_per_second": steps / (ended - began), "cpu_ms_per_step": 1e3 * (cpu_after - cpu_before) / steps}


def main() -> None:
    """Measure each task and print its ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--one-thread", action="store_true", help="skip SB3 with one thread per core")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of A B B A")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.tasks[0])))
        return
    earlier = arguments.out / "off_policy_end_to_end.json"
    result: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"tasks": {}}
    for name in arguments.tasks:
        sides = [side for side in SIDES if side != "sb3" or not arguments.one_thread]
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for side in [*sides, *reversed(sides)] * arguments.rounds:
            runs[side].append(_in_own_process(side, name))
            print(f"{name}, {side}: {_text(runs[side][-1])}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"machine": provenance("stable-baselines3"), "settings": TASKS[name], "runs": runs}
        medians = {
            side: {key: float(np.median([run[key] for run in each])) for key in each[0]} for side, each in runs.items()
        }
        theirs = max(medians[side]["steps_per_second"] for side in medians if side != "unidle")
        row |= {"medians": medians, "ratio": medians["unidle"]["steps_per_second"] / theirs}
        row["cpu_ratio"] = medians["sb3, 1 thread"]["cpu_ms_per_step"] / medians["unidle"]["cpu_ms_per_step"]
        result["tasks"][name] = row
        save("off_policy_end_to_end", result, arguments.out)
    for name, row in result["tasks"].items():
        print(name)
        for side, median in row["medians"].items():
            print(f"    {side:<16}{_text(median)}")
        print(f"    {row['ratio']:.2f} times the faster SB3 side; with one thread, by CPU time {row['cpu_ratio']:.2f}")


def _text(speed: dict[str, float]) -> str:
    return f"{speed['steps_per_second']:,.0f} steps/s, {speed['cpu_ms_per_step']:.3f} ms of CPU time per step"


def _in_own_process(side: str, name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--tasks", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, {side} failed:\n{done.stderr}")
    speed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return speed


if __name__ == "__main__":
    main()
