"""Several workers on one core, of which one is awake at a time.

The runs of a group have worker processes of their own, more than there are cores: while one run infers or learns, the
workers of the others need its cores. If all of them waited busily, as the workers of a run alone do, those without work
would take the core from the one that has some; if all of them slept, the trainer would have to wake one for every
slice, which takes it as long as an inference. So the workers of a core hand it over to one another: the one that is
awake watches for the others too, and wakes one that has work before it sleeps.

    trainer                              workers of the core
    sets flags, then `pending[seat]`  →  whoever is awake sees it, wakes that seat, and sleeps
                                      →  if all are asleep, the trainer wakes the seat itself

Nothing is lost: a worker sets `asleep`, looks once more for work of its own and of others, then sleeps; the trainer
sets `pending`, then looks whether all are asleep. Both have a memory fence in between, so at least one of them sees the
other's write. And if the worker that is awake dies or blocks, nothing hangs: every other one looks for work of its own
each `_LOOK_SECONDS`.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unidle.envs.pool.signals import SEMAPHORE_BYTES, Semaphore, WakeUp, fence
from unidle.envs.shared_block import map_memory, shared_memory

_SEATS = 64  # per core: one cache line of flags
_CORE_BYTES = (2 + _SEATS) * _SEATS  # `pending` and `asleep` of each seat, and their semaphores
_LOOK_SECONDS = 5e-3
_RUNS_PER_SET = 2  # while one infers or learns, the other has the cores
WATCH_SECONDS = 5e-3  # a worker without work watches so long before it sleeps too: no other one needs the core
_NO, _YES = b"\0", b"\1"
assert SEMAPHORE_BYTES == _SEATS


@dataclass(frozen=True)
class SeatPlace:
    """Where a worker finds its seat."""

    descriptor: int  # of the memory of all cores
    index: int  # of the core, among those with workers
    seat: int


class Seat:
    """A worker's place at its core, with a doorbell for it."""

    def __init__(self, memory: mmap.mmap, place: SeatPlace) -> None:
        """In the trainer, or in the worker."""
        self.place, self._memory = place, memory
        self._pendings = _CORE_BYTES * place.index
        self._asleeps = self._pendings + _SEATS
        self._end = self._asleeps + _SEATS
        self._pending, self._asleep = self._pendings + place.seat, self._asleeps + place.seat
        self._semaphores: dict[int, Semaphore] = {}
        self._semaphore = self._semaphore_of(place.seat)

    def _semaphore_of(self, seat: int) -> Semaphore:
        if seat not in self._semaphores:
            self._semaphores[seat] = Semaphore(self._memory, self._end + SEMAPHORE_BYTES * seat, initialise=False)
        return self._semaphores[seat]

    def reset(self) -> None:
        """Before a worker starts here: it begins awake."""
        Semaphore(self._memory, self._end + SEMAPHORE_BYTES * self.place.seat, initialise=True)
        self._memory[self._pending], self._memory[self._asleep] = 0, 0

    def leave(self) -> None:
        """Once its worker has ended."""
        self._memory[self._pending], self._memory[self._asleep] = 0, 1

    @property
    def wake_up(self) -> WakeUp:
        """For ringing in C."""
        first = self._semaphore.address - self._end - SEMAPHORE_BYTES * self.place.seat  # of the memory
        return WakeUp(
            first + self._asleep, self._semaphore.address, pending=first + self._pending, seats=first + self._asleeps
        )

    def ring(self) -> None:
        """Announce work to the worker."""
        self._memory[self._pending] = 1
        fence()
        if not self._is_anyone_awake():
            self._wake(self.place.seat)

    def wait(
        self, has_work: Callable[[], bool], seconds: float, spin: float = 0.0, *, yields_core: bool = True
    ) -> None:
        """Wait until there is work, or may be, for at most that many seconds.

        The worker stays awake for the first `spin` seconds, unless another one has work.
        """
        memory, began = self._memory, time.perf_counter()
        until, end = began + min(spin, seconds), began + seconds
        while True:
            memory[self._pending] = 0
            if has_work():
                return
            if memory.find(_YES, self._pendings, self._asleeps) >= 0 or time.perf_counter() >= until:
                break
            if yields_core:
                os.sched_yield()
        while self._semaphore.take():
            pass
        memory[self._asleep] = 1
        fence()
        while not has_work() and (left := end - time.perf_counter()) > 0:
            self._hand_over()
            if self._semaphore.wait(min(left, _LOOK_SECONDS)):
                break
        memory[self._asleep] = 0

    def _hand_over(self) -> None:
        """Wake the next worker that has work, unless one is awake."""
        find = self._memory.find
        at = find(_YES, self._pending + 1, self._asleeps)
        at = at if at >= 0 else find(_YES, self._pendings, self._pending)
        if at >= 0 and not self._is_anyone_awake():
            self._wake(at - self._pendings)

    def _is_anyone_awake(self) -> bool:
        return self._memory.find(_NO, self._asleeps, self._end) >= 0

    def _wake(self, seat: int) -> None:
        self._memory[self._asleeps + seat] = 0  # at once, so that nobody else wakes one too
        self._semaphore_of(seat).post()


class WorkerCores:
    """The cores of the workers: all but the first, which is left to the trainer.

    A trainer that shares its core with workers that are always busy gets it too late, and every run waits.

    Two runs share each set of cores. A step of a run ends when the last of its workers has stepped. If these met the
    workers of many other runs, one of them would nearly always find its core taken.
    """

    def __init__(self, cores: Iterable[int], runs: int) -> None:
        """For up to `runs` runs at a time."""
        _, *chosen = sorted(cores)
        sets = max(1, min(runs // _RUNS_PER_SET, len(chosen)))
        self._sets = [[int(core) for core in part] for part in np.array_split(chosen, sets)]
        self._first = np.cumsum([0, *map(len, self._sets)])  # [set] the index of its first core
        self._runs: list[set[int]] = [set() for _ in self._sets]  # [set] the seats that its runs have on each core
        self._descriptor = shared_memory(_CORE_BYTES * len(chosen))
        self._memory = map_memory(self._descriptor)
        for index in range(len(chosen)):
            for seat in range(_SEATS):
                self._seat(index, seat).leave()

    def take(self, workers: int) -> list[tuple[int, Seat]]:
        """Cores for one more run, and a seat on each: so many if its set has as many; none if all seats are taken."""
        number = min(range(len(self._sets)), key=lambda one: len(self._runs[one]))
        seat = next((one for one in range(_SEATS) if one not in self._runs[number]), None)
        if seat is None:
            return []
        self._runs[number].add(seat)
        first, own = int(self._first[number]), self._sets[number]
        # Runs with fewer workers than cores begin at different ones.
        places = [(seat * workers + worker) % len(own) for worker in range(min(workers, len(own)))]
        return [(own[place], self._seat(first + place, seat)) for place in places]

    def give_back(self, seats: Sequence[Seat]) -> None:
        """The workers of a run have ended."""
        for seat in seats:
            seat.leave()
        number = int(np.searchsorted(self._first, seats[0].place.index, "right")) - 1
        self._runs[number].discard(seats[0].place.seat)

    def _seat(self, index: int, seat: int) -> Seat:
        return Seat(self._memory, SeatPlace(self._descriptor, index, seat))

    def close(self) -> None:
        """Close the descriptor; processes that have mapped the memory keep it."""
        os.close(self._descriptor)
