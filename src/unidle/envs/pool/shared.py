"""What the pools of several runs in one process share."""

from __future__ import annotations

from dataclasses import dataclass

from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.worker_cores import WorkerCores


@dataclass(frozen=True)
class SharedPools:
    """The pools that one process serves in turns."""

    count: int
    ready: SharedDoorbell  # rung by the workers of all of them
    cores: WorkerCores | None  # None: the scheduler chooses where a worker runs

    def close(self) -> None:
        """Close what they share; once every pool is closed."""
        self.ready.close()
