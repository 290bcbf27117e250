"""What a run goes on from: all of it in one checkpoint, and back into the parts that are already there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from unidle.algos.registry import Algorithm
from unidle.config import Config
from unidle.engine.build import spaces_to_plain
from unidle.engine.checkpoint.run_folder import (
    RunFolder,
    random_state,
    restore_random_state,
    weights_that_fit,
    without_memory,
)
from unidle.engine.clock import RunClock
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import Collector
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.metrics.journal import how_good


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    iteration: int = 0
    best_success: float = -math.inf  # success of the best evaluation so far, if it is told, …
    best_return: float = -math.inf  # … its mean return …
    best_step: int = -1  # … and the step it was of
    highest_return: float = -math.inf  # mean return of whichever evaluation had the most
    last_evaluated: int = -1  # step at which an evaluation was last asked for

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values out of a checkpoint, among whatever else is in it.

        One written when return alone decided on the best does not tell its success.
        """
        state = {"best_success": -math.inf, "highest_return": state["best_return"], **state}
        for name in asdict(self):
            setattr(self, name, state[name])

    def take_note(self, evaluation: dict[str, Any]) -> bool:
        """Whether the evaluation of this record is the best so far, which it then is from now on."""
        self.highest_return = max(self.highest_return, evaluation["eval/return_mean"])
        if not how_good(evaluation) > (self.best_success, self.best_return):
            return False
        self.best_success, self.best_return = how_good(evaluation)
        self.best_step = evaluation["step"]
        return True

    @property
    def best(self) -> dict[str, Any] | None:
        """What is known of the best evaluation, as its record has it."""
        if self.best_step < 0:
            return None
        told = {"eval/success": self.best_success} if self.best_success >= 0 else {}
        return {"step": self.best_step, "eval/return_mean": self.best_return, **told}


@dataclass(frozen=True)
class Saver:
    """The parts of a run that a checkpoint is of."""

    config: Config
    env_spec: EnvSpec
    algo: Algorithm
    collector: Collector | DeviceCollector
    progress: Progress
    clock: RunClock
    kernels: str  # that compute it, in words

    def save(self, folder: RunFolder, evaluations: list[dict[str, Any]]) -> None:
        """Write a checkpoint; `evaluations` are those asked for and not done."""
        state = {
            "spaces": spaces_to_plain(self.env_spec),
            "algo": self.algo.state_dict(),
            "collector": self.collector.state_dict(),
            "random": random_state(),
            **asdict(self.progress),
            "evaluations": evaluations,
            "wall": self.clock.wall(),
            "seconds": self.clock.seconds(),
            "kernels": self.kernels,
        }
        if not self.config.run.save_replay_buffer:
            state = without_memory(state)
        folder.save(state, self.progress.step, self.config.run.keep_checkpoints)

    def save_best(self, folder: RunFolder, weights: dict[str, Any], step: int) -> None:
        """Write the checkpoint to evaluate and predict with: the policy alone, as it was at `step`."""
        folder.save_best({"spaces": spaces_to_plain(self.env_spec), "algo": {"policy": dict(weights)}, "step": step})

    def restore(self, state: dict[str, Any], say: Callable[[str], None]) -> str:
        """Put a checkpoint's values into the parts; UsageError if it is of other ones. Returns its kernels."""
        if state["spaces"] != spaces_to_plain(self.env_spec):
            raise UsageError(
                "The environment has other spaces than the checkpoint; resume with the one it was trained on."
            )
        was_on_device = "moving" in state["collector"]
        if was_on_device != self.env_spec.on_device:
            raise UsageError(
                "This run's environments live on the device, those of worker processes are their twins; leave out "
                "--workers and --subproc."
                if was_on_device
                else "This run's environments are in worker processes; go on there: --subproc."
            )
        recipe = self.config.recipe
        with weights_that_fit():
            self.algo.load_state_dict(state["algo"])
        if "memory" not in state["algo"].get("experience", {"memory": None}):
            say(
                f"What was remembered is not in the checkpoint (--no-save-replay-buffer): learning goes on when "
                f"{vars(recipe)['learning_starts']:,} steps are collected anew."
            )
        lost = self.collector.load_state_dict(state["collector"])
        if lost:
            say(
                f"{len(lost)} of {recipe.n_envs} environments are not deterministic, or too far into their episode: "
                "these could not be replayed and start anew, so this run will differ from one that was never stopped."
            )
        self.progress.load_state_dict(state)
        self.clock.go_on_from(state["wall"], state["seconds"])
        restore_random_state(state["random"])
        before: str = state.get("kernels", self.kernels)  # an older checkpoint does not tell
        if before != self.kernels:
            say(
                f"The kernels that compute this run are others than before ({before} → {self.kernels}), so it will not "
                "be bit for bit one that was never stopped."
            )
        return before
