"""Training speed on Atari: unidle, SB3 and a captured CleanRL-style loop on ale-py's vector environment, in one run.

    python benchmarks/atari.py [--game breakout] [--n-envs 64] [--seconds 8]

PPO with the recipe of the preset `atari-fast` at `--n-envs`, `--n-steps`, `--batch-size`. Every side steps the same
`AtariVectorEnv` (rewards clipped, frame skip 4, no sticky actions, resets in the same step), in a process of its own,
one after the other: A B C … and then back. *bare* is the environment alone with random actions, the best of several
numbers of threads; *halves* the same through unidle's two processes. *strict* and *off* are unidle with and without
overlap, *sb3* is Stable-Baselines3, *captured* the loop of `captured_ppo.py`, and *envpool* unidle with overlap on
EnvPool's version of the game, if it is installed. The first iterations are warm-up, on a GPU also its first seconds; on
a GPU, two iterations are profiled after the measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from captured_ppo import Recipe, train
from cpu_bound import Meter
from machine import provenance, save

SIDES = ("bare", "halves", "sb3", "strict", "captured", "off", "envpool")


def atari_env(game: str, n_envs: int, threads: int = 0) -> Any:
    """ale-py's vector environment as unidle creates it, with ale-py's own clipping of rewards."""
    from ale_py import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    threads = threads or min(n_envs, max(1, _cores() - 1))
    return AtariVectorEnv(game, n_envs, autoreset_mode=AutoresetMode.SAME_STEP, num_threads=threads)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _rate(step: Callable[[], int], seconds: float) -> float:
    """Steps per second of `step`, which returns how many it took."""
    step()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += step()
    return steps / (time.perf_counter() - began)


def measure_bare(arguments: argparse.Namespace) -> dict[str, float]:
    """The environment alone, by number of threads; `steps_per_second` is the best."""
    n_envs, speeds = arguments.n_envs, {}
    for threads in sorted({_cores(), max(1, _cores() - 1), max(1, _cores() // 2)}):
        env = atari_env(arguments.game, n_envs, threads)
        env.reset(seed=1)
        actions = np.random.default_rng(0).integers(0, env.single_action_space.n, (64, n_envs))
        turn = iter(range(10**9))

        def step(env: Any = env, actions: np.ndarray = actions, turn: Any = turn) -> int:
            env.step(actions[next(turn) % 64])
            return n_envs

        speeds[f"threads_{threads}"] = _rate(step, arguments.seconds / 3)
        env.close()
        env.ale = None
    return {"steps_per_second": max(speeds.values()), **speeds}


def measure_halves(arguments: argparse.Namespace) -> dict[str, float]:
    """The environment through unidle's processes, with random actions."""
    from unidle.envs.make import env_maker
    from unidle.envs.probe import probe
    from unidle.envs.vector.pool import VectorPool

    maker = env_maker(f"ale:{arguments.game}")
    env_spec = probe(maker)
    envs = VectorPool(maker, env_spec, arguments.n_envs, 0, 2)
    try:
        envs.start(np.zeros(envs.n_envs, np.int64))
        rng, sizes = np.random.default_rng(0), [end - first for first, end in envs.bounds]
        envs.send(range(len(envs.bounds)))

        def step() -> int:
            ready = envs.recv(1)
            for number in ready:
                first, end = envs.bounds[number]
                envs.block.actions[first:end, 0] = rng.integers(0, env_spec.action_layout.nvec[0], end - first)
            envs.send(ready)
            return sum(sizes[number] for number in ready)

        return {"steps_per_second": _rate(step, arguments.seconds)}
    finally:
        envs.close()


def measure_unidle(arguments: argparse.Namespace, overlap: str, env: str) -> dict[str, float]:
    """One training of unidle, stopped when the measurement is complete."""
    import unidle

    meter = Meter(arguments.seconds)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if meter.mark(context.record["step"]):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        meter.runs = Path(folder)
        unidle.train(
            env,
            preset="atari-fast",
            **recipe_of(arguments),
            overlap=overlap,
            timesteps=10**9,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            quiet=True,
            after_iteration=[after_iteration],
        )
    return meter.result


def measure_sb3(arguments: argparse.Namespace) -> dict[str, float]:
    """One training of Stable-Baselines3."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_float32_matmul_precision("high")
    meter = Meter(arguments.seconds)

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            self.enough = self.num_timesteps > 0 and meter.mark(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.enough

    sizes: dict[str, Any] = {name: value for name, value in recipe_of(arguments).items() if name != "n_envs"}
    envs = as_vec_env(atari_env(arguments.game, arguments.n_envs))
    model = PPO("CnnPolicy", envs, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, **sizes)
    model.learn(10**9, callback=Watch())
    return meter.result


def as_vec_env(env: Any) -> Any:
    """ale-py's vector environment with the interface that Stable-Baselines3 expects."""
    from stable_baselines3.common.vec_env import VecEnv

    class AtariVecEnv(VecEnv):
        def __init__(self) -> None:
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

        def reset(self) -> np.ndarray:
            observations: np.ndarray = env.reset(seed=1)[0]
            return observations

        def step_async(self, actions: np.ndarray) -> None:
            env.send(actions)

        def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            observations, rewards, terminated, truncated, infos = env.recv()
            dones, reports = terminated | truncated, [dict[str, Any]() for _ in range(env.num_envs)]
            for index in np.flatnonzero(dones):
                reports[index] = {
                    "terminal_observation": infos["final_obs"][index],
                    "TimeLimit.truncated": bool(truncated[index] and not terminated[index]),
                }
            return observations, rewards.astype(np.float32), dones, reports

        def close(self) -> None:
            env.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(env, attr_name, None)] * env.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            raise NotImplementedError

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * env.num_envs

    return AtariVecEnv()


def measure_captured(arguments: argparse.Namespace) -> dict[str, float]:
    """One training of the captured loop."""
    meter = Meter(arguments.seconds)
    env = atari_env(arguments.game, arguments.n_envs)
    train(env, Recipe(**recipe_of(arguments)), meter.mark)
    env.close()
    return meter.result


def recipe_of(arguments: argparse.Namespace) -> dict[str, int]:
    """The sizes that all sides share."""
    return {name: getattr(arguments, name) for name in ("n_envs", "n_steps", "batch_size", "n_epochs")}


def measure(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One measurement."""
    if side in ("strict", "off"):
        return measure_unidle(arguments, side, f"ale:{arguments.game}")
    if side == "envpool":
        name = "".join(word.capitalize() for word in arguments.game.split("_"))
        return measure_unidle(arguments, "strict", f"envpool:{name}-v5")
    by_side = {"bare": measure_bare, "halves": measure_halves, "sb3": measure_sb3, "captured": measure_captured}
    return by_side[side](arguments)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--game", default="breakout", help="a game's name in ale-py")
    made.add_argument("--n-envs", type=int, default=64)
    made.add_argument("--n-steps", type=int, default=128)
    made.add_argument("--batch-size", type=int, default=1024)
    made.add_argument("--n-epochs", type=int, default=4)
    made.add_argument("--seconds", type=float, default=8.0)
    made.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    made.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    made.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # run one measurement in this process
    return made


def main() -> None:
    """Measure everything and print the table."""
    arguments = parser().parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, arguments)))
        return
    has_envpool = importlib.util.find_spec("envpool") is not None
    sides = [side for side in arguments.sides if side != "envpool" or has_envpool]
    about = {"game": arguments.game, **recipe_of(arguments), "seconds": arguments.seconds}
    machine = provenance("ale-py", "stable-baselines3", *(["envpool"] if has_envpool else []))
    runs: dict[str, list[dict[str, float]]] = {}
    for side in [*sides, *reversed(sides)]:
        runs.setdefault(side, []).append(_run_in_subprocess(side, sys.argv[1:]))
        measured = {name: {"runs": each, **_mean(each)} for name, each in runs.items()}
        save("atari", {**about, "machine": machine, "sides": measured}, arguments.out)
    _print_table(measured)


def _mean(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}


def _run_in_subprocess(side: str, flags: list[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *flags, "--side", side], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{side}: {measured}", file=sys.stderr, flush=True)
    return measured


def _print_table(sides: dict[str, Any]) -> None:
    speeds = {side: measured["steps_per_second"] for side, measured in sides.items()}
    print("".join(f"{head:>14}" for head in ("", "steps/s", "of bare", "× SB3", "GPU")))
    for side, speed in speeds.items():
        cells = [side, f"{speed:,.0f}"]
        cells += [f"{speed / speeds[base]:.2f}" if base in speeds else "–" for base in ("bare", "sb3")]
        gpu = sides[side].get("profiled_gpu_overall")
        cells.append("–" if gpu is None else f"{100 * gpu:.0f} %")
        print("".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
