"""The lines and tables of `unidle pack`."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from unidle.packing.jobs import Job
from unidle.packing.packed_job import PackedJob
from unidle.report.terminal.pack import PackTable, print_closing_table


def packed(name: str, **known: Any) -> PackedJob:
    """A job of which something is known."""
    found = PackedJob(Job(name, ("x",)), Path(f"{name}.log"))
    for key, value in known.items():
        setattr(found, key, value)
    return found


def running(name: str) -> PackedJob:
    known = {"cores": (0, 1, 2, 5), "started": 0.0, "ended": 245.0, "cores_used": 3.84, "memory": 3 * 2**29}
    job = packed(name, state="running", gpu_share=23.4, **known)
    job.progress._printed, job.progress.last_line = 48_213.0, "step 1M"
    return job


def pack_of(*jobs: PackedJob) -> Any:
    return SimpleNamespace(jobs=jobs, gpu=SimpleNamespace(text="GPU 0: 78 %, 12.3 of 140 GiB"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_has_a_line_per_running_job_every_30_seconds() -> None:
    clock, file = Clock(), io.StringIO()
    table = PackTable(Console(file=file, width=80), clock)
    pack = pack_of(running("a"), packed("b"))
    for clock.now in (1.0, 31.0, 32.0, 60.0, 62.0):
        table.on_poll(pack)
    line = "a  4 min 05 s  48.2k steps/s  3.84 of 4 cores  1.50 GiB  GPU 23 %  step 1M\n"
    assert file.getvalue() == (line + "GPU 0: 78 %, 12.3 of 140 GiB\n") * 2


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"state": "running", "cores": (0, 1, 2, 5)}, "a started on cores 0-2,5\n"),
        ({"state": "running", "cores": (7,)}, "a started on core 7\n"),
        ({"state": "finished", "exit_code": 0}, "a finished after 8.4 s\n"),
        ({"state": "failed", "exit_code": 3}, "a failed with code 3 after 8.4 s\n"),
        ({"state": "stopped", "exit_code": 130}, "a stopped after 8.4 s\n"),
        ({"state": "failed", "exit_code": 126, "note": "cannot be started: Exec format error"}, "a cannot be started"),
    ],
)
def test_changes_of_a_job_are_lines_of_a_log(known: dict[str, Any], line: str) -> None:
    file = io.StringIO()
    PackTable(Console(file=file)).on_change(packed("a", started=0.0, ended=8.4, **known))
    assert file.getvalue().startswith(line)


def test_closing_table_has_the_end_of_each_job() -> None:
    file = io.StringIO()
    killed = packed("killed", state="failed", exit_code=137, started=0.0, ended=1.0, process=SimpleNamespace(status=-9))
    done = packed("done", state="finished", exit_code=0, started=0.0, ended=65.0, most_memory=2**30)
    print_closing_table(Console(file=file, width=120), pack_of(done, killed, packed("late", state="not started")))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert lines[2] == ["done", "finished", "1", "min", "05", "s", "–", "1.00", "GiB", "done.log"]
    assert lines[3] == ["killed", "failed", "by", "SIGKILL", "1.0", "s", "–", "–", "killed.log"]
    assert lines[4] == ["late", "not", "started", "–", "–", "–", "–"]
    assert lines[5] == ["1", "finished,", "1", "failed,", "1", "not", "started"]


def test_low_terminal_shows_running_jobs_only() -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, height=8)
    pack = pack_of(running("a"), *(packed(f"waiting-{number}") for number in range(5)))
    console.print(PackTable(console)._table(pack))
    assert file.getvalue().count("waiting-") == 0
    assert "1 running, 5 waiting" in file.getvalue()
