"""`unidle dashboard`: the runs of a folder in a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import parse
from unidle.errors import UsageError

_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")  # what an address and a cookie hold as it is


@dataclass(frozen=True)
class _DashboardFlags:
    """Show the runs of a folder in a browser, those that train now and those that are done, until Ctrl-C.

    Each run has a page: a verdict (what the GPU waited for most), busy and idle time by cause over the run, the phases
    of any segment of it, power and energy, steps per second, and return against steps, seconds or joules. It follows a
    run that is going on. Nothing is loaded from elsewhere, and no file outside the folder is read. For one run as a
    file to keep or send: unidle report runs/my-run --html. Needs the extra `dashboard`.
    """

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of runs, or one run folder."""
    host: str = "127.0.0.1"
    """Address to listen on; any but localhost (127.0.0.1, ::1) needs a token."""
    port: int = 8765
    """Port; 0: any free port."""
    token: str | None = None
    """Access token: letters, digits and - _ . ~; if one is needed and not given, it is generated and printed."""


def dashboard_command(argv: list[str]) -> None:
    """`unidle dashboard`"""
    flags = parse(_DashboardFlags, argv, "dashboard")
    if flags.token is not None and not _TOKEN.fullmatch(flags.token):
        raise UsageError("--token takes letters, digits and - _ . ~ only; leave it out for one that is made for you.")
    if not 0 <= flags.port <= 65535:
        raise UsageError(f"--port {flags.port} is none; take one from 1024 to 65535, or 0 for any that is free.")

    try:
        from unidle.report.dashboard.serve import serve
    except ModuleNotFoundError:
        from unidle.report.dashboard.page import NEEDED

        raise UsageError(f"`unidle dashboard` {NEEDED}") from None

    def say(address: str) -> None:
        print(f"Dashboard of {flags.runs}: {address}\nCtrl-C ends it; runs go on.", flush=True)

    try:
        serve(flags.runs, flags.host, flags.port, flags.token, say)
    except KeyboardInterrupt:
        print()
