"""The result of a command that ends with an exit code of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    """What --json prints, and the exit code: of a command that a signal stopped, or of jobs that failed."""

    result: dict[str, Any] | None
    code: int
