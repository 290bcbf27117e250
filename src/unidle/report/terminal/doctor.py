"""The output of `unidle doctor`: a line per check."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from unidle.tuning.doctor import Check

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def print_checks(checks: Sequence[Check]) -> None:
    """Print the state, name and value of each check, and what to do."""
    console = Console(highlight=False)
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.state:<7}", style=_STYLES[check.state])
        line.append(f"  {check.name:<{width}}  {check.value}", style="default")
        if check.remedy:
            line.append(f": {check.remedy}")
        console.print(line, soft_wrap=True)
