"""CPU-bound environments on a machine without a GPU: stepping alone, and training.

    python benchmarks/two_cores.py [--seconds 4] [--rounds 3]

Stepping: HalfCheetah-v5 with random actions, as a share of the speed of bare processes, one per core. Training: PPO
with preset `classic` and 8 environments, against Stable-Baselines3 with its environments in one process (Dummy) and in
many (Subproc). The sides alternate, forwards and then backwards; the result is the median. Use an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cpu_bound import ENV, _step_envs
from machine import provenance, save

COUNTS = (8, 32, 64)
TRAINERS = ("unidle", "unidle strict", "sb3 dummy", "sb3 subproc")
_WARM_UP_SECONDS = 0.5


def _rate(step: Callable[[], int], seconds: float) -> float:
    """Call `step`, which returns the number of steps it took; return steps per second."""
    until = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < until:
        step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        steps += step()
    return steps / (time.perf_counter() - began)


def step_bare(n_envs: int, seconds: float) -> float:
    """Step in one process per core, each with its share of the environments, without communication."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    start, done = context.Barrier(cores), context.Queue()
    shares = [len(part) for part in np.array_split(np.arange(n_envs), cores)]
    children = [context.Process(target=_step_envs, args=(share, seconds, start, done)) for share in shares]
    for child in children:
        child.start()
    total = sum(done.get() for _ in children)
    for child in children:
        child.join()
    return float(total / seconds)


def step_unidle(n_envs: int, seconds: float, env: str = ENV) -> float:
    """Step unidle's worker processes (for envpool:…, the adapter) as training does, with random actions."""
    import torch

    from unidle.config import Engine
    from unidle.engine.build import make_envs
    from unidle.engine.placement import choose_slices
    from unidle.envs.make import env_maker
    from unidle.envs.probe import probe

    maker = env_maker(env)
    env_spec = probe(maker, None, 0)
    cores = len(os.sched_getaffinity(0))
    slices = choose_slices(Engine(), n_envs, cores, env_spec.step_seconds, torch.device("cpu"))
    envs = make_envs(maker, env_spec, n_envs, 0, 0 if env_spec.vectorised else cores, Engine(), slices=slices)
    try:
        envs.start(np.zeros(n_envs, np.int64))
        actions = np.random.default_rng(0).uniform(-1, 1, (64, *envs.block.actions.shape)).astype(np.float32)
        sizes = [end - first for first, end in envs.bounds]
        at_least, turn = max(1, len(envs.bounds) // 4), 0
        envs.block.actions[:] = actions[0]
        envs.send(range(len(envs.bounds)))

        def step() -> int:
            nonlocal turn
            turn += 1
            ready = envs.recv(at_least)
            for number in ready:
                envs_of_slice = slice(*envs.bounds[number])
                envs.block.actions[envs_of_slice] = actions[turn % 64, envs_of_slice]
            envs.send(ready)
            return sum(sizes[number] for number in ready)

        return _rate(step, seconds)
    finally:
        envs.close()


def _step_vector(envs: Any, n_envs: int, seconds: float) -> float:
    envs.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (64, n_envs, 6)).astype(np.float32)
    turn = 0

    def step() -> int:
        nonlocal turn
        turn += 1
        envs.step(actions[turn % 64])
        return n_envs

    try:
        return _rate(step, seconds)
    finally:
        envs.close()


def step_process_vector_env(n_envs: int, seconds: float) -> float:
    """Step unidle.ProcessVectorEnv."""
    import unidle

    return _step_vector(unidle.ProcessVectorEnv([_make] * n_envs), n_envs, seconds)


def step_gymnasium_async(n_envs: int, seconds: float) -> float:
    """Step Gymnasium's AsyncVectorEnv."""
    import gymnasium

    return _step_vector(gymnasium.vector.AsyncVectorEnv([_make] * n_envs), n_envs, seconds)


def step_sb3_subproc(n_envs: int, seconds: float) -> float:
    """Step SB3's SubprocVecEnv."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return _step_vector(SubprocVecEnv([_make] * n_envs), n_envs, seconds)


def _make() -> Any:
    import gymnasium

    return gymnasium.make(ENV)


STEPPERS: dict[str, Callable[[int, float], float]] = {
    "bare": step_bare,
    "unidle": step_unidle,
    "unidle as VectorEnv": step_process_vector_env,
    "gymnasium async": step_gymnasium_async,
    "sb3 subproc": step_sb3_subproc,
    "envpool by the adapter": lambda n_envs, seconds: step_unidle(n_envs, seconds, f"envpool:{ENV}"),
}


def train(side: str, seconds: float) -> float:
    """Training steps per second, from the second iteration on."""
    marks: list[tuple[float, int]] = []

    def enough(step: int) -> bool:
        marks.append((time.perf_counter(), step))
        return len(marks) >= 3 and marks[-1][0] - marks[0][0] >= seconds

    if side.startswith("unidle"):
        import unidle

        with tempfile.TemporaryDirectory() as folder:
            unidle.train(
                ENV,
                preset="classic",
                n_envs=8,
                device="cpu",
                overlap="strict" if side.endswith("strict") else "off",
                timesteps=10**9,
                runs_dir=folder,
                eval_every=0,
                checkpoint_every=10**9,
                tensorboard=False,
                quiet=True,
                after_iteration=[lambda context: context.stop() if enough(context.record["step"]) else None],
            )
    else:
        _train_sb3(side, enough)
    (began, first), (ended, last) = marks[0], marks[-1]
    return (last - first) / (ended - began)


def _train_sb3(side: str, enough: Callable[[int], bool]) -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:
            self.over = self.num_timesteps > 0 and enough(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.over

    envs = make_vec_env(ENV, 8, vec_env_cls=SubprocVecEnv if side == "sb3 subproc" else DummyVecEnv)
    PPO("MlpPolicy", envs, device="cpu").learn(10**9, callback=Watch())
    envs.close()


def main() -> None:
    """Measure both and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    parser.add_argument("--only", choices=["stepping", "training"])
    # Internal: side, and number of environments or "train".
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, what = arguments.one
        rate = train(side, arguments.seconds) if what == "train" else STEPPERS[side](int(what), arguments.seconds)
        print(json.dumps(rate))
        return
    result: dict[str, Any] = {"machine": provenance("stable-baselines3"), "env": ENV, "stepping": {}, "training": {}}
    if arguments.only != "training":
        for count in COUNTS:
            result["stepping"][str(count)] = _measure_alternating(list(STEPPERS), str(count), arguments)
            save("two_cores", result, arguments.out)
    if arguments.only != "stepping":
        result["training"] = _measure_alternating(list(TRAINERS), "train", arguments)
        save("two_cores", result, arguments.out)
    _print_tables(result)


def _measure_alternating(sides: list[str], what: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    rates_by_side: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(arguments.rounds):
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            command = [sys.executable, __file__, "--one", side, what, "--seconds", str(arguments.seconds)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{side} ({what}) failed:\n{done.stderr}")
            rates_by_side[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{what} {side}: {rates_by_side[side][-1]:,.0f} steps/s", file=sys.stderr, flush=True)
    return {
        side: {"steps_per_second": float(np.median(rates)), "rounds": rates} for side, rates in rates_by_side.items()
    }


def _print_tables(result: dict[str, Any]) -> None:
    if result["stepping"]:
        print("stepping alone".ljust(26) + "".join(f"{count:>18} envs" for count in result["stepping"]))
        for side in STEPPERS:
            cells = []
            for measured in result["stepping"].values():
                rate = measured[side]["steps_per_second"]
                cells.append(f"{rate:>12,.0f} ({rate / measured['bare']['steps_per_second']:5.0%})")
            print(side.ljust(26) + "".join(f"{cell:>23}" for cell in cells))
    if result["training"]:
        best = max(
            measured["steps_per_second"] for side, measured in result["training"].items() if side.startswith("sb3")
        )
        print("training (classic, 8 envs)")
        for side, measured in result["training"].items():
            rate = measured["steps_per_second"]
            print(f"{side:<26}{rate:>12,.0f} steps/s, {rate / best:.2f} times the faster SB3 side")


if __name__ == "__main__":
    main()
