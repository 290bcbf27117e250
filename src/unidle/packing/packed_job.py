"""One job of a pack while it waits, runs and ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unidle.config.files import display_path
from unidle.packing.gpu import SharedGpu
from unidle.packing.jobs import Job
from unidle.packing.process_tree import descendants, resources
from unidle.packing.progress import Progress
from unidle.packing.supervised import SupervisedProcess

State = Literal["waiting", "running", "finished", "failed", "stopped", "not started"]


@dataclass
class PackedJob:
    """A job and what is known of it now."""

    job: Job
    output: Path
    progress: Progress = field(init=False)
    state: State = "waiting"
    process: SupervisedProcess | None = None
    cores: tuple[int, ...] = ()
    started: float | None = None  # by time.monotonic
    ended: float | None = None
    exit_code: int | None = None  # as in a shell: 128 + n after signal n
    note: str = ""  # why it could not start
    cores_used: float | None = None
    memory: int | None = None  # bytes
    most_memory: int = 0
    gpu_share: float | None = None  # percent
    _cpu: tuple[float, float] | None = None  # (when, CPU seconds so far) at the last poll

    def __post_init__(self) -> None:
        self.progress = Progress(self.output)

    @property
    def seconds(self) -> float | None:
        """Since its start, or from start to end."""
        return None if self.started is None else (self.ended or time.monotonic()) - self.started

    def poll(self, gpu: SharedGpu) -> None:
        """Update what it uses and how far it is."""
        assert self.process is not None
        processes = descendants(self.process.supervisor_pid)
        self.progress.poll(processes)
        now, (cpu, self.memory) = time.monotonic(), resources(processes)
        if self._cpu is not None and now > self._cpu[0]:
            self.cores_used = max(0.0, cpu - self._cpu[1]) / (now - self._cpu[0])
        self._cpu = now, cpu
        self.most_memory = max(self.most_memory, self.memory)
        self.gpu_share = gpu.share(process.pid for process in processes)

    def end(self, state: State, exit_code: int) -> None:
        """It has ended, or could not start."""
        self.state, self.exit_code, self.ended = state, exit_code, time.monotonic()
        self.cores_used = self.memory = self.gpu_share = None

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.job.name,
            "command": list(self.job.command),
            "cwd": str(self.job.cwd.absolute()),
            "state": self.state,
            "exit_code": self.exit_code,
            "note": self.note or None,
            "seconds": self.seconds,
            "steps_per_second": self.progress.steps_per_second,
            "cores": list(self.cores),
            "gpu_memory": self.job.gpu_memory,
            "most_memory": self.most_memory or None,
            "output": display_path(self.output.absolute()),
            "run": display_path(self.progress.run) if self.progress.run else None,
        }
