"""`unidle report`: write the report of a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import Result, parse
from unidle.errors import UsageError
from unidle.groups.folder import GroupFolder
from unidle.groups.page import write_group_page


@dataclass(frozen=True)
class _ReportFlags:
    """Write the report of a run, or of a group of runs (report.html), from its metrics; also works during training."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, such as runs/my-run, or the folder of a group."""
    html: Path | None = None
    """Write the run's dashboard page instead, as one file (extra `dashboard`), to this .html path; without a path,
    to dashboard.html in the run folder."""
    json: bool = False
    """Print the result as a JSON object."""


_BARE_HTML = "--html=."  # what a bare --html means


def report_command(argv: list[str]) -> Result:
    """`unidle report`"""
    following = [*argv[1:], ""]
    bare = [word == "--html" and not after.endswith(".html") for word, after in zip(argv, following)]
    flags = parse(_ReportFlags, [_BARE_HTML if is_bare else word for word, is_bare in zip(argv, bare)], "report")
    try:
        if flags.html is None and GroupFolder.is_one(flags.run):
            group = GroupFolder.open(flags.run)
            path = write_group_page(flags.run, group.runs, group.failures)
        elif flags.html is None:
            from unidle.report.page.report import write_report

            path = write_report(flags.run, lambda text: print(f"unidle: {text}", file=sys.stderr))
        else:
            from unidle.report.dashboard.page import write_page

            path = write_page(flags.run, flags.run / "dashboard.html" if flags.html == Path() else flags.html)
    except OSError as error:
        where, fix = flags.html or flags.run, "choose another path" if flags.html else "make the folder writable"
        raise UsageError(f"The page cannot be written to {where} ({error.strerror}); {fix}.") from None
    if flags.json:
        return {"path": str(path)}
    print(path)
    return None
