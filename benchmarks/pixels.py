"""PPO from images: unidle against Stable-Baselines3 and bare stepping, the same work, one run, one machine.

    python benchmarks/pixels.py [--seconds 8] [--rounds 2]

Observations of 84 × 84 × 4 bytes from 64 environments whose step takes 150 µs (pixel_env.py), the Nature CNN, rollouts
of 64 × 128, minibatches of 1,024, 4 epochs: in TF32 and bfloat16, with strict overlap and without. Stable-Baselines3
runs the same recipe with a process per environment. Each measurement is a separate process, warm-up as in cpu_bound.py;
repeated ones alternate, A B B A. Bare stepping is the ceiling: the same environments divided among processes that do
nothing else. The captured minibatch alone (pixel_minibatch.py) is measured in several forms beside its floor: its
arithmetic and least memory traffic at the peak rates of an H200.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cpu_bound import Meter, in_phase
from machine import provenance, save
from pixel_env import Quadrant
from pixel_minibatch import FORMS, measured

UNIDLE = [f"{overlap} {precision}" for overlap in ("strict", "off") for precision in ("tf32", "bf16")]
MINIBATCHES = [f"{form} {precision}" for form in FORMS for precision in ("tf32", "bf16")]


def recipe_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The recipe, as settings of unidle."""
    return {
        "n_envs": flags.n_envs,
        "n_steps": flags.n_steps,
        "batch_size": flags.batch_size,
        "n_epochs": flags.n_epochs,
        "net_arch": (),  # like CnnPolicy: linear heads on the CNN's features
        "learning_rate": 2.5e-4,
        "clip_range": 0.1,
        "ent_coef": 0.01,
    }


def measure_unidle(flags: argparse.Namespace, side: str) -> dict[str, float]:
    """Run one training, stopped when the measurement is complete."""
    import unidle
    from unidle.engine.collect.host import HostCollector
    from unidle.engine.overlap import Overlap

    for owner, method, phase in (
        (HostCollector, "finish", "rollout"),
        (Overlap, "_learn_while_collecting", "learning"),
    ):
        setattr(owner, method, in_phase(phase, getattr(owner, method)))
    overlap, precision = side.split()
    meter = Meter(flags.seconds)

    def after_iteration(context: unidle.CallbackContext) -> None:
        if meter.mark(context.record["step"]):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        meter.runs = Path(folder)
        unidle.train(
            Quadrant,
            algo="ppo",
            env_kwargs={"step_us": flags.step_us},
            **recipe_of(flags),
            overlap=overlap,
            precision=precision,
            timesteps=10**9,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            subproc=True,
            quiet=True,
            after_iteration=[after_iteration],
        )
    return meter.result


def measure_sb3(flags: argparse.Namespace) -> dict[str, float]:
    """Train SB3 with the same recipe; in TF32, which is torch's default for convolutions."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_float32_matmul_precision("high")
    meter = Meter(flags.seconds)

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            self.enough = self.num_timesteps > 0 and meter.mark(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.enough

    envs = make_vec_env(
        Quadrant,
        flags.n_envs,
        vec_env_cls=SubprocVecEnv,
        env_kwargs={"step_us": flags.step_us},
        vec_env_kwargs={"start_method": "forkserver"},
    )
    recipe = recipe_of(flags)
    shared = {name: recipe[name] for name in recipe.keys() - {"n_envs", "net_arch"}}
    model = PPO("CnnPolicy", envs, policy_kwargs={"net_arch": []}, **shared)
    for method, phase in (("collect_rollouts", "rollout"), ("train", "learning")):
        setattr(model, method, in_phase(phase, getattr(model, method)))
    model.learn(10**9, callback=Watch())
    envs.close()
    return meter.result


def measure_minibatch(flags: argparse.Namespace, side: str) -> dict[str, float]:
    """The minibatch alone."""
    from unidle.config import PPORecipe

    return measured(PPORecipe(**recipe_of(flags)), side, flags.seconds / 4)


def _step_envs(n_envs: int, step_us: float, seconds: float, start: Any, done: Any) -> None:
    envs = [Quadrant(step_us) for _ in range(n_envs)]
    for number, env in enumerate(envs):
        env.reset(seed=number)
    start.wait()
    steps, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for env in envs:
            truncated = env.step(steps % 4)[3]
            if truncated:
                env.reset()
            steps += 1
    done.put(steps)


def bare_stepping(flags: argparse.Namespace) -> dict[str, float]:
    """Steps per second of processes that only step, by their number."""
    context = multiprocessing.get_context("spawn")
    cores, seconds = len(os.sched_getaffinity(0)), min(2.0, flags.seconds)
    speeds = {}
    for processes in sorted({min(flags.n_envs, count) for count in (cores, max(1, cores - 1))}):
        start, done = context.Barrier(processes), context.Queue()
        shares = [len(part) for part in np.array_split(np.arange(flags.n_envs), processes)]
        children = [
            context.Process(target=_step_envs, args=(share, flags.step_us, seconds, start, done)) for share in shares
        ]
        for child in children:
            child.start()
        speeds[str(processes)] = sum(done.get() for _ in children) / seconds
        for child in children:
            child.join()
    return speeds


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; the defaults are the published work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="*", default=["sb3", *UNIDLE], choices=["sb3", *UNIDLE])
    parser.add_argument("--minibatches", nargs="*", default=MINIBATCHES, choices=MINIBATCHES)
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each side")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--n-envs", type=int, default=64)
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--n-epochs", type=int, default=4)
    parser.add_argument("--step-us", type=float, default=150.0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=["sb3", *UNIDLE, *MINIBATCHES], help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure everything and print the tables."""
    flags = parsed(argv)
    if flags.side:
        alone = flags.side in MINIBATCHES
        one = measure_minibatch(flags, flags.side) if alone else None
        one = one or (measure_sb3(flags) if flags.side == "sb3" else measure_unidle(flags, flags.side))
        print(json.dumps(one))
        return one
    result: dict[str, Any] = {
        "machine": provenance("stable-baselines3"),
        "work": {**recipe_of(flags), "step_us": flags.step_us},
        "stepping": [bare_stepping(flags)],
        "sides": {},
        "minibatches": {},
    }
    there = list(flags.sides)
    for number in range(flags.rounds):
        for side in there if number % 2 == 0 else there[::-1]:
            runs = [*result["sides"].get(side, {}).get("runs", []), _in_subprocess(flags, side)]
            result["sides"][side] = {"runs": runs, **_mean(runs)}
            save("pixels", result, flags.out)
    for side in [*flags.minibatches, *flags.minibatches[::-1]]:
        runs = [*result["minibatches"].get(side, {}).get("runs", []), _in_subprocess(flags, side)]
        result["minibatches"][side] = {"runs": runs, **_mean(runs)}
    result["stepping"].append(bare_stepping(flags))
    save("pixels", result, flags.out)
    _print_tables(result)
    return result


def _in_subprocess(flags: argparse.Namespace, side: str) -> dict[str, float]:
    numbers = ("seconds", "n_envs", "n_steps", "batch_size", "n_epochs", "step_us")
    given = [word for name in numbers for word in (f"--{name.replace('_', '-')}", str(getattr(flags, name)))]
    done = subprocess.run([sys.executable, __file__, "--side", side, *given], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{side}: {found}", file=sys.stderr, flush=True)
    return found


def _mean(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}


def _print_tables(result: dict[str, Any]) -> None:
    ceiling = max(speed for each in result["stepping"] for speed in each.values())
    base = result["sides"].get("sb3", {}).get("steps_per_second")
    print(f"bare stepping: {ceiling:,.0f} steps/s")
    print("".join(f"{head:>16}" for head in ("", "steps/s", "× SB3", "of stepping", "GPU busy")))
    for side, found in result["sides"].items():
        speed, busy = found["steps_per_second"], found.get("profiled_gpu_overall")
        cells = [side, f"{speed:,.0f}", f"{speed / base:.1f}" if base else "–", f"{speed / ceiling:.2f}"]
        cells.append("–" if busy is None else f"{100 * busy:.0f} %")
        print("".join(f"{cell:>16}" for cell in cells))
    print("".join(f"{head:>20}" for head in ("minibatch", "ms", "floor on an H200")))
    for side, found in result["minibatches"].items():
        print("".join(f"{cell:>20}" for cell in (side, f"{found['ms']:.3f}", f"{found['floor_ms']:.3f}")))


if __name__ == "__main__":
    main()
