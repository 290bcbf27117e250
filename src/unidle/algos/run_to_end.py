"""Runs a generator that yields between parts of its work, such as `registry.Algorithm.update_in_parts`, to its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run_to_end(work: Generator[Any, None, _Result]) -> _Result:
    """Run all parts of `work` and return its return value."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        work.close()  # after a Ctrl-C between two parts
