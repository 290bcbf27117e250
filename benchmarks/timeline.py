"""What the GPU does while SB3 and unidle train with the same recipe, and the return of the same runs over time.

    python benchmarks/timeline.py [--preset beast] [--overlap off] [--seconds 60]

PPO on HalfCheetah-v5. Each side in turn has the machine for itself, in a process of its own: first SB3 with one process
per environment (SubprocVecEnv), then `unidle.train` with its usual evaluations, checkpoints and TensorBoard. With
`--overlap off` the recipe is SB3's; with `--overlap strict`, the default of `beast` on a GPU, unidle also collects
while it learns. Both keep their policy every `--every` seconds, and after the training these policies are evaluated in
the same way: SB3 does not pay for evaluations. The GPU is recorded last, after `--seconds` of training, from the start
of an iteration: torch's profiler, GPU activities only, gives the interval of every kernel (copies do not count as
busy). A profiler costs time, so steps/s are those before the recording; those during it are in the JSON beside them.
`tools/timeline_picture.py` draws the result. Without a GPU there is nothing to record, and only the returns are
measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cpu_bound import ENV, sb3_model
from machine import RESULTS, provenance, save

from unidle.meter.watch.inside.unidle_windows import KernelIntervals, Window, torch_in_use, try_window

SIDES = ("sb3", "unidle")
EPISODES, EVALUATION_SEED = 10, 10_000
TIMESTEPS = 10_000_000  # more than any side reaches; unidle evaluates ten times and saves at intervals of it
BIN_SECONDS = 0.004
_WARM_UP = 0.2  # of the seconds: start-up, and the run's own meter, which uses the profiler once
_SETTINGS = ("preset", "overlap", "seconds", "every", "window", "seed", "changes")
_MAX_WINDOWS = 3  # torch's profiler may lose a window
_PATIENCE = 60.0  # seconds until the profiler is free

Weights = dict[str, Any]
Predict = Callable[[np.ndarray], np.ndarray]


class Recorder:
    """Keeps policies during a training, then records the GPU for a few iterations."""

    def __init__(self, seconds: float, every: float, window: float) -> None:
        self._seconds, self._every, self._length = seconds, every, window
        self.kept: list[tuple[float, int, Weights]] = []
        self._marks: list[tuple[float, int]] = []
        self._window: Window | None = None
        self._windows = 0
        self._opened = 0.0, 0  # when and at which step the window was
        self.recorded: dict[str, Any] | None = None

    def start(self, weights: Callable[[], Weights]) -> None:
        """Training begins."""
        self._began = time.perf_counter()
        self.kept.append((0.0, 0, weights()))

    def iteration(self, step: int, weights: Callable[[], Weights]) -> bool:
        """An iteration is done; True when everything has been recorded."""
        wall = time.perf_counter() - self._began
        if not self._windows:
            self._marks.append((wall, step))
            if wall // self._every > self.kept[-1][0] // self._every:
                self.kept.append((wall, step, weights()))
            if wall < self._seconds:
                return False
        return self._recorded(wall, step)

    def steps_per_second(self) -> float:
        """Steps per second after the warm-up, before the GPU is recorded."""
        after = [mark for mark in self._marks if mark[0] >= _WARM_UP * self._seconds]
        if len(after) < 2:
            raise SystemExit("Fewer than two iterations ended after the warm-up; give more --seconds.")
        (began, first), (ended, last) = after[0], after[-1]
        return (last - first) / (ended - began)

    def _recorded(self, wall: float, step: int) -> bool:
        """Whether the window is closed, or there is no GPU."""
        import torch

        if not torch.cuda.is_available():
            return True
        if self._window is not None:
            if wall - self._opened[0] < self._length:
                return False
            torch.cuda.synchronize()
            began_ns = self._window.begun_ns
            seen = self._window.close()
            self._window = None
            if seen is not None:
                seconds, steps = wall - self._opened[0], step - self._opened[1]
                self.recorded = recording(seen, began_ns, seconds, self._length) | {"steps_per_second": steps / seconds}
                return True
        if self._windows == _MAX_WINDOWS or wall > self._seconds + _PATIENCE:
            raise SystemExit("torch's profiler could not be used or lost its kernels; run it again.")
        torch.cuda.synchronize()
        self._window = try_window(torch_in_use())  # None while the run's own meter uses the profiler
        self._windows += self._window is not None
        self._opened = time.perf_counter() - self._began, step
        return False


def recording(seen: KernelIntervals, began_ns: int, seconds: float, shown: float) -> dict[str, Any]:
    """The share of `seconds` in which a kernel ran, and of each bin of the first `shown` seconds."""
    width = round(BIN_SECONDS * 1e9)
    edges = [began_ns + i * width for i in range(round(shown / BIN_SECONDS) + 1)]
    return {
        "seconds": seconds,
        "kernels": seen.n_kernels,
        "busy": seen.within(began_ns, began_ns + round(seconds * 1e9)) / (seconds * 1e9),
        "bin_seconds": BIN_SECONDS,
        "bins": [round(seen.within(left, right) / width, 3) for left, right in pairwise(edges)],
    }


def mean_return(predict: Predict) -> float:
    """Mean return of `EPISODES` episodes with the mode action, the same first states for every policy."""
    import gymnasium

    envs = gymnasium.make_vec(ENV, EPISODES, vectorization_mode="sync")
    observations, _ = envs.reset(seed=EVALUATION_SEED)
    returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while running.any():
        observations, rewards, terminated, truncated, _ = envs.step(predict(observations))
        returns += rewards * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train_sb3(recorder: Recorder, arguments: argparse.Namespace) -> Callable[[Weights], Predict]:
    """Train with SB3; return what makes a policy of weights that were kept."""
    from stable_baselines3.common.callbacks import BaseCallback

    from unidle.config.presets import load_preset

    def weights() -> Weights:
        return _copied(model.policy.state_dict())

    class Watch(BaseCallback):
        is_over = False

        def _on_training_start(self) -> None:
            recorder.start(weights)

        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            self.is_over = self.num_timesteps > 0 and recorder.iteration(self.num_timesteps, weights)

        def _on_step(self) -> bool:
            return not self.is_over

    model = sb3_model({**load_preset(arguments.preset).values, **arguments.changes}, arguments.seed)
    model.learn(TIMESTEPS, callback=Watch())
    model.get_env().close()

    def policy_of(kept: Weights) -> Predict:
        model.policy.load_state_dict(kept)
        return lambda observations: model.predict(observations, deterministic=True)[0]

    return policy_of


def train_unidle(recorder: Recorder, arguments: argparse.Namespace) -> Callable[[Weights], Predict]:
    """Train with unidle; return what makes a policy of weights that were kept."""
    import unidle

    def start(context: unidle.CallbackContext) -> None:
        recorder.start(lambda: _copied(context.policy.state_dict()))

    def after_iteration(context: unidle.CallbackContext) -> None:
        if recorder.iteration(context.record["step"], lambda: _copied(context.policy.state_dict())):
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        agent = unidle.train(
            ENV,
            preset=arguments.preset,
            **arguments.changes,
            overlap=arguments.overlap,
            seed=arguments.seed,
            timesteps=TIMESTEPS,
            runs_dir=folder,
            quiet=True,
            on_start=[start],
            after_iteration=[after_iteration],
        ).agent

    def policy_of(kept: Weights) -> Predict:
        agent.policy.load_state_dict(kept)
        return agent.predict

    return policy_of


def _copied(weights: Weights) -> Weights:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}


def measure(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one side in this process, then evaluate the policies that were kept."""
    recorder = Recorder(arguments.seconds, arguments.every, arguments.window)
    train = train_sb3 if side == "sb3" else train_unidle
    policy_of = train(recorder, arguments)
    curve = [(wall, step, mean_return(policy_of(weights))) for wall, step, weights in recorder.kept]
    return {"steps_per_second": recorder.steps_per_second(), "curve": curve, "recorded": recorder.recorded}


def main() -> None:
    """Run both sides, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="beast")
    parser.add_argument("--overlap", choices=["off", "strict"], default="off", help="of unidle")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training before the GPU is recorded")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between policies that are kept")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of the recording that are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--changes", type=json.loads, default={}, help="overrides of the preset, as JSON, for a test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # internal: run one side in this process
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, arguments)))
        return
    settings = {"env": ENV, "episodes": EPISODES}
    settings |= {name: getattr(arguments, name) for name in _SETTINGS}
    result: dict[str, Any] = {"machine": provenance("stable-baselines3"), "settings": settings, "sides": {}}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{side} failed.")
        result["sides"][side] = found = json.loads(done.stdout.splitlines()[-1])
        seconds, steps, score = found["curve"][-1]
        line = f"{side:<8}{found['steps_per_second']:>10,.0f} steps/s, return {score:,.0f} after {seconds:.0f} s"
        if (recorded := found["recorded"]) is not None:
            line += f"; GPU busy {recorded['busy']:.1%} of {recorded['seconds']:.1f} s ({recorded['kernels']:,} kernels"
            line += f", {recorded['steps_per_second']:,.0f} steps/s)"
        print(f"{line}, {steps:,} steps", flush=True)
        save("timeline", result, arguments.out)


if __name__ == "__main__":
    main()
