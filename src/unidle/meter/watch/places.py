"""Names the function in which an activity spends its time: the innermost one that accounts for most of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from unidle.meter.watch.samples import Frame, Stack
from unidle.meter.watch.stacks import (
    ENVIRONMENT,
    EVALUATION,
    OWN,
    display_name,
    innermost_user_frame,
    is_own,
    named_frames,
)

_MOST = 0.5  # share of an activity's time from which a function is named
_CALLS_USER = (ENVIRONMENT, EVALUATION, OWN)  # in other phases of unidle, the user's functions matter only if slow


@dataclass(frozen=True)
class Place:
    """A function with its share of an activity's time, and a line of the user's code."""

    function: str
    share: float
    """Share of the activity's time inside the function, calls included."""
    is_own: bool
    """Whether the function is the user's own; otherwise the line below is the one that calls it."""
    file: str | None
    line: int | None
    """The user's line with most of the time; None if the user's code is not on the stack."""

    @property
    def source(self) -> str | None:
        """train.py:12, or called in train.py:12; of code outside functions, which goes by its file: line 12."""
        if self.file is None:
            return None
        name = os.path.basename(self.file)
        if name == self.function:
            return None if self.line is None else f"line {self.line}"
        where = name if self.line is None else f"{name}:{self.line}"
        return where if self.is_own else f"called in {where}"


def place_of(stacks: Sequence[Stack], activity: str) -> Place | None:
    """Return the place of the stacks of one activity; None if none of its functions may be named."""
    whole = sum(stack.wall for stack in stacks)
    inside: dict[tuple[str, str], float] = defaultdict(float)
    depth: dict[tuple[str, str], int] = {}  # smallest distance to the innermost frame
    frames: dict[tuple[str, str], Frame] = {}
    for stack in stacks:
        named = {(frame.file, frame.name): frame for frame in reversed(named_frames(stack, activity))}
        for i, (key, frame) in enumerate(reversed(named.items())):
            inside[key] += stack.wall
            depth[key] = min(i, depth.get(key, i))
            frames[key] = frame
    if not inside or not whole:
        return None
    most = [key for key in inside if inside[key] >= _MOST * whole]
    if most:
        key = min(most, key=lambda key: (inside[key], depth[key]))
    elif all(stack.phase is not None for stack in stacks) and activity not in _CALLS_USER:
        return None
    else:
        key = max(inside, key=lambda key: (inside[key], -depth[key]))
    own = is_own(frames[key])
    file, line = _line_of(stacks, activity, key) if own else _calling_line(stacks, activity, key)
    return Place(display_name(frames[key]), inside[key] / whole, own, file, line)


def _line_of(stacks: Sequence[Stack], activity: str, key: tuple[str, str]) -> tuple[str, int | None]:
    """Return the line of a function with most of the time."""
    lines: dict[int, float] = defaultdict(float)
    for stack in stacks:
        found = next((f for f in named_frames(stack, activity) if (f.file, f.name) == key and f.line), None)
        if found is not None:
            lines[found.line] += stack.wall
    return key[0], max(lines, key=lambda line: lines[line], default=None)


def _calling_line(stacks: Sequence[Stack], activity: str, key: tuple[str, str]) -> tuple[str | None, int | None]:
    """Return the user's line from which a library's function is called for most of the time."""
    lines: dict[tuple[str, int], float] = defaultdict(float)
    for stack in stacks:
        if any((f.file, f.name) == key for f in named_frames(stack, activity)):
            caller = innermost_user_frame(stack)
            if caller is not None and caller.line:
                lines[caller.file, caller.line] += stack.wall
    return max(lines, key=lambda line: lines[line], default=(None, None))
