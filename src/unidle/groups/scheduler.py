"""Runs several runs in one process, in turns: whichever need not wait goes on.

While the environments of one run step, another infers or learns, and their work on the GPU overlaps, because each
learns on a stream of its own. A run's results do not depend on when it gets its turns, because it has networks,
buffers, environments and generators of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from unidle.engine.collect.step_loop import Steps, Waiting, step_all
from unidle.engine.on_stream import OnStream
from unidle.engine.turns import IsReady, Turns
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.worker import SPIN_SECONDS

_POLL_SECONDS = 5e-4  # between two looks at a GPU, which cannot ring
_LOOK_SECONDS = 5e-5  # the same, while the loop in C steps environments of other runs
_OWN_CORE_SPIN_SECONDS = 5e-3  # nobody else needs the core, and waking up takes as long as a step


def _do_nothing(*_: object) -> None:
    pass


@dataclass(eq=False)
class Member:
    """A run of a group."""

    name: str
    turns: Turns[None]
    stream: torch.cuda.Stream | None  # on which it learns
    close: Callable[[], None]
    on_failure: Callable[[Exception], None] = _do_nothing
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._on_stream = OnStream(self.stream)

    def take_turn(self) -> IsReady | None:
        """Continue until the run would wait next."""
        with self._on_stream:
            return next(self.turns)

    def end(self) -> None:
        """Free what the run uses: its files, its environments, the cores of its workers, and its networks."""
        with contextlib.ExitStack() as end:
            end.callback(self._forget)
            end.callback(self.close)
            end.enter_context(self._on_stream)
            end.callback(self.turns.close)

    def _forget(self) -> None:
        self.close = _do_nothing  # a method of the run, which the member may outlive


Successors = Callable[[Member], Iterable[Member]]


def no_successors(_: Member) -> Iterable[Member]:
    """No run follows one that has ended."""
    return ()


def take_turns(
    members: Iterable[Member],
    pools: SharedPools,
    *,
    yields_core: bool,
    successors: Successors = no_successors,
) -> None:
    """Run all members to their ends; one that fails keeps its error, and leaves the others undisturbed.

    When a member has ended, its `successors` join the others.
    """
    waiting: dict[Member, IsReady | None] = dict.fromkeys(members)
    spin = SPIN_SECONDS if pools.cores is None else _OWN_CORE_SPIN_SECONDS
    in_c = Waiting.on(pools.ready.wake_up, spin, yields_core=yields_core)

    def anyone_is_ready() -> bool:
        return any(map(_is_ready, waiting.values()))

    def step_environments(seconds: float, but: Member | None = None) -> bool:
        """Let the loop in C step all environments that it may step, but not those of one run; False if it may none."""
        steps = [ready for one, ready in waiting.items() if isinstance(ready, Steps) and one is not but]
        loops = [ready.loop for ready in steps if not ready.loop.needs_python]
        if loops:
            step_all(loops, seconds if len(steps) == len(waiting) else min(seconds, _LOOK_SECONDS), in_c)
        return bool(loops)

    with contextlib.ExitStack() as end:
        end.callback(_end_all, waiting)  # after a second Ctrl-C
        while waiting:
            has_run = False
            for member in list(waiting):
                if not _is_ready(waiting[member]):
                    continue
                has_run = True
                step_environments(0.0, but=member)  # a turn may take as long as many steps
                try:
                    waiting[member] = member.take_turn()
                    continue
                except StopIteration:
                    pass
                except Exception as error:
                    member.error = error
                    member.on_failure(error)
                del waiting[member]
                try:
                    member.end()
                except Exception as error:
                    member.error = member.error or error
                waiting.update(dict.fromkeys(successors(member)))
            if not has_run and not step_environments(_POLL_SECONDS):
                pools.ready.wait(anyone_is_ready, spin + _POLL_SECONDS, spin, yields_core=yields_core)


def _is_ready(is_ready: IsReady | None) -> bool:
    """Whether a run can continue; also if it cannot tell: then it fails when it continues."""
    try:
        return is_ready is None or is_ready()
    except Exception:
        return True


def _end_all(members: Iterable[Member]) -> None:
    """End all `members`, each even if another raises."""
    with contextlib.ExitStack() as end:
        for member in members:
            end.callback(member.end)
