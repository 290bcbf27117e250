"""Return against wall time on HalfCheetah-v5 with preset `beast`: Stable-Baselines3, unidle, unidle with overlap.

    python benchmarks/race.py [--seconds 30] [--seed 1] [--picture docs/images/halfcheetah.svg]

Each side in turn gets the whole machine for `--seconds` of training. The return is the mean of the last 100 training
episodes, so no side pauses for evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cpu_bound import ENV, sb3_model
from machine import RESULTS, provenance, save

from unidle.report.page.phase_colours import series_style
from unidle.report.page.svg import Series, line_chart, standalone

SIDES = {"sb3": "Stable-Baselines3", "off": "unidle", "strict": "unidle, --overlap strict"}
Curve = list[tuple[float, int, float]]  # [seconds since training began, steps, return]


def race_unidle(overlap: str, seed: int, seconds: float, changes: dict[str, Any]) -> Curve:
    """Train unidle for `seconds`."""
    import unidle

    curve: Curve = []

    def watch(context: unidle.CallbackContext) -> None:
        record = context.record
        if "rollout/return_mean" in record:
            curve.append((record["wall"], record["step"], record["rollout/return_mean"]))
        if record["wall"] >= seconds:
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            ENV,
            preset="beast",
            **changes,
            overlap=overlap,
            seed=seed,
            timesteps=10**9,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            subproc=True,
            runs_dir=folder,
            quiet=True,
            after_iteration=[watch],
        )
    return curve


def race_sb3(seed: int, seconds: float, changes: dict[str, Any]) -> Curve:
    """Train SB3 with the same recipe for `seconds`."""
    from stable_baselines3.common.callbacks import BaseCallback

    from unidle.config.presets import load_preset

    curve: Curve = []

    class Watch(BaseCallback):
        is_over = False

        def _on_training_start(self) -> None:
            self.began = time.perf_counter()

        def _on_rollout_start(self) -> None:
            wall, episodes = time.perf_counter() - self.began, self.model.ep_info_buffer
            if episodes:
                curve.append((wall, self.num_timesteps, float(np.mean([episode["r"] for episode in episodes]))))
            self.is_over = wall >= seconds

        def _on_step(self) -> bool:
            return not self.is_over

    model = sb3_model({**load_preset("beast").values, **changes}, seed)
    model.learn(10**9, callback=Watch())
    model.get_env().close()
    return curve


def draw(curves: dict[str, Curve], seed: int, gpu: str | None) -> str:
    """All sides in one chart."""
    colours = {"strict": 0, "sb3": 1, "off": 2}  # unidle's first colour, as in other pictures
    series = [
        Series(SIDES[side], [point[0] for point in curve], [point[2] for point in curve], style=series_style(colour))
        for side, colour in colours.items()
        for curve in [curves[side]]
    ]
    size = (720, 330)
    title = f"{ENV}, preset beast, {gpu or 'CPU'}, seed {seed}"
    chart = line_chart(title, series, "seconds of training", "return of the last 100 episodes", size=size)
    return standalone(chart, size)


def main() -> None:
    """Run all sides, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="overrides of the preset, as JSON; for a quick test"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--picture", type=Path, default=None, help="draw the chart into this SVG file")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)  # internal: run one side in this process
    arguments = parser.parse_args()
    if arguments.side == "sb3":
        print(json.dumps(race_sb3(arguments.seed, arguments.seconds, arguments.changes)))
        return
    if arguments.side:
        print(json.dumps(race_unidle(arguments.side, arguments.seed, arguments.seconds, arguments.changes)))
        return
    curves: dict[str, Curve] = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--seed", str(arguments.seed)]
        command += ["--seconds", str(arguments.seconds), "--changes", json.dumps(arguments.changes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        curves[side] = json.loads(done.stdout.splitlines()[-1])
        seconds, steps, score = curves[side][-1]
        print(f"{SIDES[side]:<26}{score:8.0f} after {steps:>10,} steps and {seconds:.0f} s", flush=True)
    machine = provenance("stable-baselines3")
    settings = {"env": ENV, "preset": "beast", "seed": arguments.seed, **arguments.changes}
    save("race", {"machine": machine, "settings": settings, "curves": curves}, arguments.out)
    if arguments.picture:
        arguments.picture.write_text(draw(curves, arguments.seed, machine["gpu"]) + "\n")


if __name__ == "__main__":
    main()
