"""Turns: a run is a generator, so that several runs can share a process and a GPU.

It yields before it waits for environments or for the GPU, and between parts of its work. The yielded value tells when
it can continue without waiting; the code after the yield waits in any case. So a single run is `run_to_end`, which
ignores what is yielded, and several runs take turns: whichever can continue does (groups/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

_Result = TypeVar("_Result")

IsReady = Callable[[], bool]  # whether the run can continue without waiting
Turns = Generator[IsReady | None, None, _Result]  # None: it can continue at once
