"""Interfaces to a run: the user's callbacks, the progress display, and the time meter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.config.convert import in_brief
from unidle.errors import UsageError
from unidle.metrics.log import MetricLog
from unidle.timeline import Timeline


@dataclass
class CallbackContext:
    """What a callback receives: a record, the policy, functions that end the run and log numbers, the run folder.

    `rollout` and `state` are valid until the callback returns.
    """

    record: dict[str, Any]  # of the iteration or evaluation; at the start and end of a run its step alone
    policy: AnyPolicy
    stop: Callable[[], None]
    log: Callable[[Mapping[str, Any]], None]
    folder: Path
    rollout: Rollout | None  # of the iteration; None elsewhere, and if the device runs several iterations at a time
    state: Callable[[], dict[str, Any]]  # the content of a checkpoint


Callback = Callable[[CallbackContext], None]


@dataclass(frozen=True)
class Callbacks:
    """The user's functions, by when they are called."""

    on_start: Sequence[Callback] = ()
    after_iteration: Sequence[Callback] = ()
    after_evaluation: Sequence[Callback] = ()
    on_end: Sequence[Callback] = ()


@dataclass(frozen=True)
class CallbackRunner:
    """Calls functions of the user with the context of one run."""

    folder: Path
    metric_log: MetricLog
    stop: Callable[[], None]
    state: Callable[[], dict[str, Any]]

    def call(
        self, callbacks: Sequence[Callback], record: dict[str, Any], policy: AnyPolicy, rollout: Rollout | None = None
    ) -> None:
        """Call all `callbacks` with this record."""
        if callbacks:
            step = record["step"]
            log = partial(self._log, step)
            context = CallbackContext(record, policy, self.stop, log, self.folder, rollout, self.state)
            for callback in callbacks:
                callback(context)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """`CallbackContext.log`: a record of kind `user` in metrics.jsonl, and its numbers in every writer."""
        numbers = {}
        for name, value in values.items():
            if not isinstance(name, str) or name in ("kind", "step"):
                raise UsageError(f"context.log needs names such as 'my/metric', not {name!r}; rename it.")
            try:
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(f"context.log: `{name}` must be a number, not {in_brief(value)}.") from None
        self.metric_log.write({"kind": "user", "step": step, **numbers})


class ProgressDisplay(Protocol):
    """Shows a run to the user."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """The run starts; a resumed one at `step`, with the `best` evaluation so far."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """An iteration is done."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """An evaluation is done."""

    def on_message(self, text: str) -> None:
        """Show a message."""

    def on_end(self) -> None:
        """The run is over, finished or failed."""


class SilentDisplay:
    """Shows no progress; subclasses decide what to do with messages."""

    def on_start(self, facts: dict[str, str], total_steps: int, step: int, best: dict[str, Any] | None) -> None:
        """Show nothing."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def on_meter(self, line: dict[str, Any]) -> None:
        """Show nothing."""

    def on_end(self) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class RunGpu:
    """The GPU that a run uses."""

    uuid: str
    captures: Callable[[], int]  # number of CUDA graph captures so far


class TimeMeter(Protocol):
    """Measures where a run's time goes; its errors must never end the run."""

    def begin(self, folder: Path, timeline: Timeline, step: int, gpu: RunGpu | None) -> None:
        """The run starts, or resumes at `step`."""

    def iteration(self, step: int, wall: float, has_learned: bool) -> None:
        """An iteration is done, `wall` seconds into the run."""

    def end(self) -> None:
        """The run is over, finished or failed."""
