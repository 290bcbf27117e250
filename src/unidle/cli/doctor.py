"""`unidle doctor`: check this machine and this installation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from unidle.cli.flags import Result, parse
from unidle.cli.results import WithCode


@dataclass(frozen=True)
class _DoctorFlags:
    """Check what unidle needs and what makes it fast: Python, torch, GPU, cores, memory, extras, the runs' folder.

    Each line is ok, a note (training works, and this would help) or a problem (training fails, or a GPU stays unused),
    with what to do. The exit code is 1 if there is a problem.
    """

    runs_dir: Path = Path("runs")
    """Parent folder of the run folders, which must be writable."""
    json: bool = False
    """Print the result as a JSON object."""


def doctor_command(argv: list[str]) -> Result | WithCode:
    """`unidle doctor`"""
    flags = parse(_DoctorFlags, argv, "doctor")

    from unidle.tuning.doctor import examine

    checks = examine(flags.runs_dir)
    problems = sum(check.state == "problem" for check in checks)
    result = {"checks": [dataclasses.asdict(check) for check in checks], "problems": problems}
    if not flags.json:
        from unidle.report.terminal.doctor import print_checks

        print_checks(checks)
    return WithCode(result if flags.json else None, 1 if problems else 0)
