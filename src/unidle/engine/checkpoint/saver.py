"""Collects the state of a run into one checkpoint, which a thread writes, and restores it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

from unidle.algos.registry import Algorithm
from unidle.config import Config
from unidle.config.resolve import learning_settings
from unidle.engine.build import spaces_to_plain
from unidle.engine.checkpoint.background import BackgroundWriter
from unidle.engine.checkpoint.checkpoint_file import explain_weight_mismatch
from unidle.engine.checkpoint.rank_folder import weights_digest
from unidle.engine.checkpoint.run_folder import RunFolder, without_replay_buffer
from unidle.engine.checkpoint.snapshot import fits_in_memory, snapshot
from unidle.engine.clock import RunClock
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.engine.progress import Progress
from unidle.envs.open_episode import Difference
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError, WriteError
from unidle.rng import random_state, restore_random_state

_SHORT_SECONDS, _MAX_SHARE = 0.25, 0.05  # a longer save may take at most this share of the run's time


class Saver:
    """Saves and restores the parts of a run."""

    def __init__(
        self,
        config: Config,
        env_spec: EnvSpec,
        algo: Algorithm,
        collector: HostCollector | DeviceCollector,
        progress: Progress,
        clock: RunClock,
        kernels: str,
        say: Callable[[str], None],
    ) -> None:
        """`kernels` describes the kernels that the run uses (see `kernel_versions`)."""
        self._config, self._env_spec, self._algo, self._collector = config, env_spec, algo, collector
        self._progress, self.clock, self.kernels = progress, clock, kernels
        self._say = say
        self._settings = learning_settings(config)  # once: it takes longer than the copy of a small network
        self._writer = BackgroundWriter()
        self.ranks = 1  # of a data-parallel run
        self._next_may_fail = False  # the latest checkpoint of this process was written, so the next one may fail
        self._began = self._saved_at = perf_counter()  # of the latest checkpoint
        self._save_seconds = 0.0

    def keep_settings(self, settings: str) -> None:
        """Save `learning_settings` of an earlier checkpoint: nothing was learned with those of this process."""
        self._settings = settings

    def save(self, folder: RunFolder, evaluations: list[dict[str, Any]]) -> None:
        """Take a snapshot, which a thread writes; waits for the previous one. `evaluations` are the pending ones.

        WriteError if the previous one could not be written (see `check`).
        """
        self._writer.wait()
        self.check()
        self._began = perf_counter()
        state = self.state(evaluations)
        if not self._config.run.save_replay_buffer:
            state = without_replay_buffer(state)
        has_copy = fits_in_memory(state)
        copied, step = snapshot(state) if has_copy else state, self._progress.step
        self._writer.start(lambda: self._write(folder, copied, step))
        if not has_copy:
            self._writer.wait()  # before training changes the original

    def state(self, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
        """The content of a checkpoint; its tensors are those of the run, not copies."""
        return {
            "settings": self._settings,
            "spaces": spaces_to_plain(self._env_spec),
            "algo": self._algo.state_dict(),
            "collector": self._collector.state_dict(),
            "random": random_state(),
            **asdict(self._progress),
            "evaluations": evaluations,
            "wall": self.clock.wall(),
            "seconds": self.clock.seconds(),
            "kernels": self.kernels,
            **self._env_statistics(),
            **({"ranks": self.ranks, "weights": weights_digest(self._algo)} if self.ranks > 1 else {}),
        }

    def _write(self, folder: RunFolder, state: dict[str, Any], step: int) -> None:
        """In the writer's thread."""
        folder.save(state, step, self._config.run.keep_checkpoints)
        self._saved_at = perf_counter()
        self._save_seconds = self._saved_at - self._began
        self._next_may_fail = True

    def check(self) -> None:
        """Raise WriteError if a checkpoint could not be written, and neither could the one before.

        A single failure is reported, and training continues: the next checkpoint may succeed.
        """
        error = self._writer.take_error()
        if isinstance(error, WriteError) and self._next_may_fail:
            self._next_may_fail = False
            self._say(f"{error.what}; training continues. If the next checkpoint cannot be written either, it ends.")
        elif error is not None:
            raise error

    def finish(self) -> None:
        """Wait until the latest checkpoint is on the disk; WriteError if it cannot be written."""
        self._next_may_fail = False
        self._writer.wait()
        self.check()

    def close(self) -> None:
        """Wait for an unfinished write, at the end of a run that failed."""
        self._writer.wait()

    def is_worth_saving(self) -> bool:
        """Whether enough has happened since the last checkpoint: a large replay buffer takes long to save."""
        now = perf_counter()
        seconds = now - self._began if self._writer.is_busy else self._save_seconds
        return seconds < max(_SHORT_SECONDS, _MAX_SHARE * (now - self._saved_at))

    def save_best(self, folder: RunFolder, weights: dict[str, Any], step: int) -> None:
        """Write the checkpoint to evaluate and predict with: only the policy, as it was at `step`."""
        state = {
            "settings": self._settings,
            "spaces": spaces_to_plain(self._env_spec),
            "algo": {"policy": dict(weights)},
            "step": step,
            **self._env_statistics(),
        }
        folder.save_best(state)

    def _env_statistics(self) -> dict[str, Any]:
        found = self._collector.env_statistics()
        return {"env_statistics": found} if found else {}

    def require_same_spaces(self, state: dict[str, Any]) -> None:
        """UsageError if a checkpoint is of an environment with other spaces."""
        if state["spaces"] != spaces_to_plain(self._env_spec):
            raise UsageError(
                "The environment's spaces differ from the checkpoint's; resume with the environment it was trained on."
            )

    def restore(self, state: dict[str, Any], say: Callable[[str], None]) -> str:
        """Restore the parts from a checkpoint; UsageError if it does not fit. Returns the kernels that it names."""
        self.require_same_spaces(state)
        was_on_device = "moving" in state["collector"]
        if was_on_device != self._env_spec.on_device:
            raise UsageError(
                "This run's environments are on the device, and cannot move to worker processes; leave out --workers "
                "and --subproc."
                if was_on_device
                else "This run's environments are in worker processes; resume it with --subproc."
            )
        recipe = self._config.recipe
        with explain_weight_mismatch():
            self._algo.load_state_dict(state["algo"])
        if "memory" not in state["algo"].get("experience", {"memory": None}):
            say(
                f"The checkpoint has no replay buffer (--no-save-replay-buffer): learning resumes after "
                f"{vars(recipe)['learning_starts']:,} new steps."
            )
        self._collector.load_env_statistics(state.get("env_statistics", {}))
        differences = self._collector.load_state_dict(state["collector"])
        if differences:
            say(_describe(differences, recipe.n_envs))
        if self._env_spec.unsaved:
            say(
                f"The environment keeps state from one episode to the next that is not saved "
                f"({', '.join(self._env_spec.unsaved)}): if its observations or rewards depend on that, this run will "
                "differ from an uninterrupted one; give its class state_dict() and load_state_dict()."
            )
        self._progress.load_state_dict(state)
        self.clock.resume(state["wall"], state["seconds"])
        restore_random_state(state["random"])
        before: str = state.get("kernels", self.kernels)
        if before != self.kernels:
            say(
                f"This run continues on other kernels ({before} → {self.kernels}), so it will not match an "
                "uninterrupted run bit for bit."
            )
        return before


def _describe(differences: dict[int, Difference], n_envs: int) -> str:
    env, first = next(iter(differences.items()))
    lost = sum(difference.is_lost for difference in differences.values())
    return (
        f"{len(differences)} of {n_envs} environments did not repeat their open episode (environment {env}: "
        f"{first.text}){f', and {lost} of them start a new one' if lost else ''}: this run will differ from an "
        "uninterrupted one. `unidle check-env` looks for the cause."
    )
