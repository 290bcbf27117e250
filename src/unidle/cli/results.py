"""The result of a command that was stopped by a signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Signalled:
    """The result of a command that a signal stopped; the exit code says which."""

    result: dict[str, Any] | None
    signal: int
