"""A Stable-Baselines3 callback that measures how training time splits into rollout and learning.

    from unidle.integrations.sb3 import IdleMeter
    model.learn(100_000, callback=IdleMeter())

It adds two timestamps per vector step, and GPU readings if there is a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from unidle.errors import UsageError
from unidle.meter.attribution.phases import Phase, PhaseMeter, PhaseRow, table

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError:
    raise UsageError("IdleMeter needs Stable-Baselines3; run: pip install stable-baselines3.") from None

ENVIRONMENT, ROLLOUT, LEARNING = "rollout: environment", "rollout: other", "learning"
_LOG_EVERY_S = 5.0  # building the table takes tens of milliseconds

_running: IdleMeter | None = None


class IdleMeter(BaseCallback):
    """Prints a table at the end of `learn`, and logs each phase's share and power as `idle/…` every few seconds.

    *rollout: environment* is the vector environment's step, *rollout: other* is inference, storage and
    callbacks after a step (an EvalCallback evaluates there), *learning* is the time from the end of a rollout to the
    start of the next. Start-up and shutdown are *unattributed*.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__()
        self._quiet = quiet
        self._meter: PhaseMeter | None = None
        self._open: Phase | None = None
        self._restore: Callable[[], None] = lambda: None
        self._logged: dict[str, float] = {}
        self._next_log_s = 0.0
        self.rows: list[PhaseRow] = []
        """The table, once training has ended."""

    def _on_training_start(self) -> None:
        global _running
        if _running is not None:
            _running._end()  # left over from a `learn` that ended with an error or Ctrl-C
        self._logged, self._next_log_s = {}, 0.0
        self._meter = PhaseMeter()
        self._meter.start()
        _running = self
        self._restore = _timed(self.training_env, self._meter.phase(ENVIRONMENT))

    def _on_rollout_start(self) -> None:
        self._switch(ROLLOUT)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._switch(LEARNING)
        # A rollout may be a single step, so the table is rebuilt only every few seconds. It is recorded after every
        # rollout, because the logger clears its values whenever it writes.
        if self._meter is not None and time.monotonic() >= self._next_log_s:
            self._logged = dict(_loggable(self._meter.rows()))
            self._next_log_s = time.monotonic() + _LOG_EVERY_S
        for name, value in self._logged.items():
            self.logger.record(name, value)

    def _on_training_end(self) -> None:
        self._end()
        if self.rows and not self._quiet:
            print("", *table(self.rows), sep="\n", file=sys.stderr, flush=True)

    def _end(self) -> None:
        global _running
        if self._meter is not None:
            self._restore()
            self._meter.stop()  # also ends the open phase
            self.rows = self._meter.rows()
            self._meter = self._open = _running = None

    def _switch(self, name: str | None) -> None:
        """End the open phase and start `name`."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._meter.phase(name) if self._meter is not None and name else None
        if self._open is not None:
            self._open.__enter__()


def _timed(env: Any, stepping: Phase) -> Callable[[], None]:
    """Time `env.step` as `stepping`; returns a function that undoes this, unless `step` was replaced again."""
    step, own = env.step, vars(env).get("step")

    def timed(actions: Any) -> Any:
        with stepping:
            return step(actions)

    def restore() -> None:
        if vars(env).get("step") is timed:
            if own is None:
                del env.step  # falls back to the method of its class
            else:
                env.step = own

    env.step = timed
    return restore


def _loggable(rows: list[PhaseRow]) -> Iterator[tuple[str, float]]:
    for row in rows:
        name = row.phase.replace(": ", "_").replace(" ", "_")
        yield f"idle/{name}_share", row.share
        if row.watts is not None:
            yield f"idle/{name}_watts", row.watts
