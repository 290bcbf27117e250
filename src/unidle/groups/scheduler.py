"""Runs several runs in one process, in turns: whichever need not wait goes on.

While the environments of one run step, another infers or learns, and their work on the GPU overlaps, because each
learns on a stream of its own. A run's results do not depend on when it gets its turns: nothing that it computes is
shared with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from unidle.engine.turns import IsReady, Turns
from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.worker import SPIN_SECONDS

_POLL_SECONDS = 5e-4  # between two looks at a GPU, which cannot ring


@dataclass(eq=False)
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


def _nobody(_: Member) -> Iterable[Member]:
    return ()


def take_turns(
    members: Iterable[Member],
    ready: SharedDoorbell,
    *,
    yields_core: bool,
    successors: Callable[[Member], Iterable[Member]] = _nobody,
) -> None:
    """Run all members to their ends; one that fails keeps its error, and leaves the others undisturbed.

    When a member has ended and is closed, its `successors` join the others.
    """
    waiting: dict[Member, IsReady | None] = dict.fromkeys(members)

    def anyone_is_ready() -> bool:
        return any(is_ready is None or is_ready() for is_ready in waiting.values())

    try:
        while waiting:
            has_run = False
            for member, is_ready in list(waiting.items()):
                if is_ready is not None and not is_ready():
                    continue
                has_run = True
                try:
                    waiting[member] = member.take_turn()
                    continue
                except StopIteration:
                    pass
                except Exception as error:
                    member.error = error
                del waiting[member]
                _close(member)
                waiting.update(dict.fromkeys(successors(member)))
            if not has_run:
                ready.wait(anyone_is_ready, _POLL_SECONDS, SPIN_SECONDS, yields_core=yields_core)
    finally:  # after a second Ctrl-C too
        for member in waiting:
            member.turns.close()
            member.close()


def _close(member: Member) -> None:
    """Free what the member used: its environments, the cores of its workers, and its networks."""
    try:
        member.close()
    except Exception as error:
        member.error = member.error or error
    member.close = _do_nothing  # a method of the run, which the member may outlive


def _do_nothing() -> None:
    pass
