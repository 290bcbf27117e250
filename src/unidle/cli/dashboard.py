"""`unidle dashboard`: show the runs in a folder in a browser."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import parse
from unidle.errors import UsageError
from unidle.packing.folder import PACKS

_TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,}")  # cannot be guessed, and needs no escaping in a URL or cookie
_LEAST_VARIETY = 8  # different characters: 16 times the same can be guessed
_TOKEN_VARIABLE = "UNIDLE_DASHBOARD_TOKEN"


@dataclass(frozen=True)
class _DashboardFlags:
    """Show the running and finished runs in a folder in a browser, until Ctrl-C.

    The first page lists runs, groups (of --seeds), sweeps and packs; tick runs to compare them on one plot. Each run
    has a page: a verdict (what the GPU waited for most), busy and idle time by cause, the phases of any time range,
    power and energy, steps per second, losses, settings, and return against steps, seconds or joules. Pages of active
    runs update live. The page loads nothing from the internet, and the server reads no file outside these folders. To
    save or share a run as one file: unidle report runs/my-run --html. Needs the extra `dashboard`.

    Only a browser that has opened the printed address can see the runs: it contains a token, new at every start. To
    choose it yourself, set the environment variable UNIDLE_DASHBOARD_TOKEN.
    """

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of runs, groups and sweeps, or the folder of one of them."""
    packs: Path | None = None
    """Folder of packs, the jobs of `unidle pack`; without it, `packs` if there is one."""
    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1: only this machine can connect."""
    port: int = 8765
    """Port; 0: any free port."""
    token: str | None = None
    """Access token of at least 16 letters, digits and - _ . ~. All users of this machine can read it in the list of
    processes; set UNIDLE_DASHBOARD_TOKEN instead."""


def dashboard_command(argv: list[str]) -> None:
    """`unidle dashboard`"""
    flags = parse(_DashboardFlags, argv, "dashboard")
    token = _token(flags.token)
    if not 0 <= flags.port <= 65535:
        raise UsageError(f"--port {flags.port} is not a valid port; use 1024 to 65535, or 0 for any free port.")

    packs = flags.packs or (PACKS if PACKS.is_dir() else None)
    if packs is not None and not packs.is_dir():
        raise UsageError(f"--packs {packs} is not a folder; give the one with the folders that `unidle pack` made.")
    try:
        from unidle.report.dashboard.serve import serve
    except ModuleNotFoundError:
        from unidle.report.dashboard.page import NEEDED

        raise UsageError(f"`unidle dashboard` {NEEDED}") from None

    def print_address(address: str) -> None:
        print(f"Dashboard of {flags.runs}: {address}\nPress Ctrl-C to stop it; runs continue.", flush=True)

    try:
        serve(flags.runs, flags.host, flags.port, token, print_address, packs)
    except KeyboardInterrupt:
        print()


def _token(flag: str | None) -> str | None:
    source, token = ("--token", flag) if flag is not None else (_TOKEN_VARIABLE, os.environ.get(_TOKEN_VARIABLE))
    if token is not None and (not _TOKEN.fullmatch(token) or len(set(token)) < _LEAST_VARIETY):
        raise UsageError(
            f"{source} must be at least 16 letters, digits and - _ . ~, at least {_LEAST_VARIETY} of them different; "
            "leave it out to have a token generated."
        )
    if flag is not None:
        print(f"--token is visible to all users of this machine; set {_TOKEN_VARIABLE} instead.", file=sys.stderr)
    return token
