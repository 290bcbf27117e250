"""A pack of jobs: its page, from the summary that `unidle pack` writes whenever a job starts or ends."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from unidle.formatting import duration, short_number
from unidle.packing.folder import SUMMARY
from unidle.report.dashboard.figures import UNKNOWN, date_and_time, format_or_dash, memory
from unidle.report.dashboard.files import is_training, read_text
from unidle.report.dashboard.folders import Entry
from unidle.report.history import number

_WHEN_KILLED = {"running": "stopped", "waiting": "not started"}  # the states of jobs whose pack was killed


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a pack; None if it cannot be read."""
    is_live = is_training(folder)  # before the file, so that a finished pack is read to its end
    text = read_text(folder, SUMMARY)
    try:
        summary = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(summary, dict):
        return None
    for job in [] if is_live else jobs_of(summary):
        job["state"] = _WHEN_KILLED.get(job["state"], job["state"])
    return summary


def jobs_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs of a summary that have a state."""
    jobs = summary.get("jobs")
    return [job for job in jobs if _is_job(job)] if isinstance(jobs, list) else []


def _is_job(job: Any) -> bool:
    return isinstance(job, dict) and isinstance(job.get("state"), str)


def started_at(summary: dict[str, Any]) -> float | None:
    """Return when a pack was started, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str(summary.get("started"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


class PackReader:
    """Follows the summary of a pack."""

    def __init__(self, entry: Entry, find_run: Callable[[Path], Entry | None]) -> None:
        """`find_run` returns the run in a folder, if the dashboard shows it."""
        self._entry, self._find_run = entry, find_run
        self._summary: dict[str, Any] | None = None

    def refresh(self) -> bool:
        """Read the summary; returns whether it has changed."""
        before, self._summary = self._summary, summary_of(self._entry.folder)
        return self._summary != before

    def view(self) -> dict[str, Any]:
        """Return what the page shows."""
        summary = self._summary or {}
        facts = {
            "started": format_or_dash(started_at(summary), date_and_time),
            "at once": summary.get("at_once"),
            "NVIDIA MPS": summary.get("mps"),
        }
        return {
            "name": self._entry.name,
            "facts": [[name, str(value)] for name, value in facts.items() if value is not None],
            "jobs": [self._job(job) for job in jobs_of(summary)],
        }

    def _job(self, job: dict[str, Any]) -> dict[str, Any]:
        command, cores, run = job.get("command"), job.get("cores"), self._run(job)
        return {
            "name": str(job.get("name")),
            "run": run.path if run is not None else None,
            "state": job["state"],
            "exit": UNKNOWN if job.get("exit_code") is None else str(job["exit_code"]),
            "time": format_or_dash(number(job, "seconds"), duration),
            "rate": format_or_dash(number(job, "steps_per_second"), short_number),
            "cores": str(len(cores)) if isinstance(cores, list) and cores else UNKNOWN,
            "memory": format_or_dash(number(job, "most_memory"), memory),
            "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
            "note": str(job.get("note") or ""),
        }

    def _run(self, job: dict[str, Any]) -> Entry | None:
        """Return the run that a job has trained, if the dashboard shows it."""
        run = job.get("run")
        if not isinstance(run, str) or "\0" in run:
            return None
        return self._find_run(self._started_in() / run)

    def _started_in(self) -> Path:
        """Return the folder in which the pack was started: paths in the summary are relative to it."""
        below = PurePosixPath(str((self._summary or {}).get("folder")))
        folder = self._entry.folder
        if below.is_absolute() or folder.parts[-len(below.parts) :] != below.parts:
            return folder
        return Path(*folder.parts[: -len(below.parts)])
