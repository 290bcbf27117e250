"""Runs work that pauses (see `registry.Algorithm.learning`) without the pauses."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")


def run_to_end(work: Generator[None, None, _Result]) -> _Result:
    """What `work` returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
