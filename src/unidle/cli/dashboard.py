"""`unidle dashboard`: show the runs in a folder in a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import parse
from unidle.errors import UsageError

_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")  # needs no escaping in a URL or cookie


@dataclass(frozen=True)
class _DashboardFlags:
    """Show the running and finished runs in a folder in a browser, until Ctrl-C.

    Each run has a page: a verdict (what the GPU waited for most), busy and idle time by cause, the phases of any time
    range, power and energy, steps per second, and return against steps, seconds or joules. Pages of running runs update
    live. The page loads nothing from the internet, and the server reads no file outside the folder. To save or share
    one run as a file: unidle report runs/my-run --html. Needs the extra `dashboard`.
    """

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of runs, or one run folder."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than localhost (127.0.0.1, ::1) needs a token."""
    port: int = 8765
    """Port; 0: any free port."""
    token: str | None = None
    """Access token of letters, digits and - _ . ~; if needed and not given, one is generated and printed."""


def dashboard_command(argv: list[str]) -> None:
    """`unidle dashboard`"""
    flags = parse(_DashboardFlags, argv, "dashboard")
    if flags.token is not None and not _TOKEN.fullmatch(flags.token):
        raise UsageError("--token may contain only letters, digits and - _ . ~; omit it to have one generated.")
    if not 0 <= flags.port <= 65535:
        raise UsageError(f"--port {flags.port} is not a port; use 1024 to 65535, or 0 for any free port.")

    try:
        from unidle.report.dashboard.serve import serve
    except ModuleNotFoundError:
        from unidle.report.dashboard.page import NEEDED

        raise UsageError(f"`unidle dashboard` {NEEDED}") from None

    def say(address: str) -> None:
        print(f"Dashboard of {flags.runs}: {address}\nPress Ctrl-C to stop it; runs continue.", flush=True)

    try:
        serve(flags.runs, flags.host, flags.port, flags.token, say)
    except KeyboardInterrupt:
        print()
