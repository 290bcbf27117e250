"""How often a job was started, and whether it got further: `slurm-<job>.jsonl` in the folder of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unidle.metrics.jsonl import read_records
from unidle.writing import open_to_append

_MAX_WITHOUT_PROGRESS = 2  # attempts in a row
_CHECKPOINT = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class SlurmJob:
    """The job that this process is in."""

    id: str  # 12, or 12_3 for a task of an array: never the id of a whole array
    restarts: int
    node: str

    @staticmethod
    def of(environment: Mapping[str, str]) -> SlurmJob | None:
        """The job that the variables describe; None outside SLURM."""
        job, task = environment.get("SLURM_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        if job is None:
            return None
        if task is not None:
            # The id of an array's last task is that of the array.
            job = f"{environment.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
        restarts = environment.get("SLURM_RESTART_COUNT", "0")
        return SlurmJob(job, int(restarts) if restarts.isdecimal() else 0, environment.get("SLURMD_NODENAME", ""))

    def plain(self) -> dict[str, Any]:
        """It as plain values."""
        return {"job": self.id, "restarts": self.restarts, "node": self.node}


def step_of(folder: Path) -> int:
    """The steps in the latest checkpoints of all runs in the folder of a run, a group or a sweep."""
    latest: dict[Path, int] = {}
    for pattern in ("checkpoints", "*/checkpoints", "*/*/checkpoints"):
        for path in folder.glob(f"{pattern}/step-*.pt"):
            if found := _CHECKPOINT.fullmatch(path.name):
                latest[path.parent] = max(latest.get(path.parent, 0), int(found[1]))
    return sum(latest.values())


class Attempts:
    """The attempts of one job."""

    def __init__(self, folder: Path, job: SlurmJob) -> None:
        self._folder, self._job = folder, job
        self._path = folder / f"slurm-{job.id}.jsonl"

    def begin(self) -> None:
        """Record that an attempt starts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        with open_to_append(self._path) as file:
            file.write(json.dumps({"step": step_of(self._folder), "started": started, **self._job.plain()}) + "\n")

    @property
    def are_stuck(self) -> bool:
        """Whether the latest attempts have not completed an iteration, so that another one would not either."""
        latest = read_records(self._path)[-_MAX_WITHOUT_PROGRESS:]
        now = step_of(self._folder)
        return len(latest) == _MAX_WITHOUT_PROGRESS and all(record["step"] == now for record in latest)
