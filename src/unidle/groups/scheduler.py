"""Runs several runs in one process, in turns: whichever need not wait goes on.

While the environments of one run step, another infers or learns, and their work on the GPU overlaps, because each
learns on a stream of its own. A run's results do not depend on when it gets its turns: nothing that it computes is
shared with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unidle.engine.turns import IsReady, Turns
from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.worker import SPIN_SECONDS

_POLL_SECONDS = 5e-4  # between two looks at a GPU, which cannot ring


@dataclass
class Member:
    """A run of a group."""

    name: str
    turns: Turns[None]
    stream: torch.cuda.Stream | None  # on which it learns
    close: Callable[[], None]
    error: Exception | None = None

    def take_turn(self) -> IsReady | None:
        """Continue until the run would wait next."""
        if self.stream is None:
            return next(self.turns)
        with torch.cuda.stream(self.stream):
            return next(self.turns)


def take_turns(members: Sequence[Member], ready: SharedDoorbell, *, yields_core: bool) -> None:
    """Run all members to their ends; one that fails keeps its error, and leaves the others undisturbed."""
    waiting: dict[int, IsReady | None] = dict.fromkeys(range(len(members)))

    def anyone_is_ready() -> bool:
        return any(is_ready is None or is_ready() for is_ready in waiting.values())

    try:
        while waiting:
            has_run = False
            for index, is_ready in list(waiting.items()):
                if is_ready is not None and not is_ready():
                    continue
                has_run, member = True, members[index]
                try:
                    waiting[index] = member.take_turn()
                except StopIteration:
                    _end(member, waiting, index)
                except Exception as error:
                    member.error = error
                    _end(member, waiting, index)
            if not has_run:
                ready.wait(anyone_is_ready, _POLL_SECONDS, SPIN_SECONDS, yields_core=yields_core)
    finally:  # after a second Ctrl-C too
        for index in waiting:
            members[index].turns.close()
            members[index].close()


def _end(member: Member, waiting: dict[int, IsReady | None], index: int) -> None:
    """Free what the member used: its environments, and the cores of its workers."""
    del waiting[index]
    try:
        member.close()
    except Exception as error:
        member.error = member.error or error
