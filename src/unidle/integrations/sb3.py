"""A callback for Stable-Baselines3: where the time of its training goes, rollout and learning apart.

    from unidle.integrations.sb3 import IdleMeter
    model.learn(100_000, callback=IdleMeter())

It adds two timestamps to each vector step, and the readings of a GPU where there is one.
"""

from __future__ import annotations

import sys
from typing import Any

from unidle.errors import UsageError
from unidle.meter.phases import PhaseMeter, PhaseRow, table

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError:
    raise UsageError("IdleMeter needs Stable-Baselines3; run: pip install stable-baselines3.") from None

ENVIRONMENT, ROLLOUT, LEARNING = "rollout: environment", "rollout: the rest", "learning"


class IdleMeter(BaseCallback):
    """Prints a table at the end of `learn`, and logs each phase's share and power as `idle/…` at each rollout.

    *rollout: environment* is the vector environment's step, *rollout: the rest* inference and storage, *learning* all
    from the end of a rollout to the beginning of the next; what is left is *unattributed*: start and end.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__()
        self._quiet = quiet
        self._meter: PhaseMeter | None = None
        self._open: Any = None
        self._env: Any = None
        self.rows: list[PhaseRow] = []
        """The table, once training has ended."""

    def _on_training_start(self) -> None:
        self._meter = PhaseMeter()
        self._meter.start()
        self._env = self.training_env
        step, stepping = self._env.step, self._meter.phase(ENVIRONMENT)

        def timed(actions: Any) -> Any:
            with stepping:
                return step(actions)

        self._env.step = timed

    def _on_rollout_start(self) -> None:
        self._switch(ROLLOUT)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._switch(LEARNING)
        assert self._meter is not None
        for row in self._meter.rows():
            name = row.phase.replace(": ", "_").replace(" ", "_")
            self.logger.record(f"idle/{name}_share", row.share)
            if row.watts is not None:
                self.logger.record(f"idle/{name}_watts", row.watts)

    def _on_training_end(self) -> None:
        if self._meter is None:
            return
        self._switch(None)
        del self._env.step  # the class has its own
        self._meter.stop()
        self.rows = self._meter.rows()
        if not self._quiet:
            print("", *table(self.rows), sep="\n", file=sys.stderr, flush=True)

    def _switch(self, name: str | None) -> None:
        """End the phase that is open, and begin `name`."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._meter.phase(name) if self._meter is not None and name else None
        if self._open is not None:
            self._open.__enter__()
