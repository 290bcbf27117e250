"""The result of a command that does not end with exit code 0, although it did what it should."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WithCode:
    """The object that --json prints (None: the command printed text), and the exit code."""

    result: dict[str, Any] | None
    code: int


def signalled(result: dict[str, Any] | None, signal: int) -> WithCode:
    """The result of a command that a signal stopped."""
    return WithCode(result, 128 + signal)
