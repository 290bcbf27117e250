"""Turns: who may go on, and when."""

from __future__ import annotations

from unidle.algos.run_to_end import run_to_end
from unidle.engine.turns import Slots, Turns


class Work:
    """A run that takes a slot again and again, for one turn each."""

    def __init__(self, name: str, slots: Slots, log: list[str]) -> None:
        self.turns = self._repeat(name, slots, log)
        self._is_ready = next(self.turns)

    def continue_if_ready(self) -> None:
        if self._is_ready is None or self._is_ready():
            self._is_ready = next(self.turns)

    @staticmethod
    def _repeat(name: str, slots: Slots, log: list[str]) -> Turns[None]:
        while True:
            yield from slots.take()
            log.append(name)
            try:
                yield None
            finally:
                slots.give_back()


def test_runs_share_slots_in_the_order_in_which_they_wait() -> None:
    slots, log = Slots(2), list[str]()
    works = [Work(name, slots, log) for name in "abcd"]
    assert log == ["a", "b"]
    for _ in range(4):
        for work in works:
            work.continue_if_ready()
    assert all(sorted(log[i : i + 4]) == list("abcd") for i in range(0, len(log) - 3, 4))


def test_slot_of_a_run_that_ends_is_free() -> None:
    slots, log = Slots(1), list[str]()
    works = [Work(name, slots, log) for name in "abc"]
    works[1].turns.close()  # while it waits
    works[0].turns.close()  # while it has the slot
    works[2].continue_if_ready()
    assert log == ["a", "c"]


def test_run_alone_never_waits_for_a_slot() -> None:
    slots = Slots(1)
    for _ in range(3):
        assert list(slots.take()) == []
        slots.give_back()
    run_to_end(slots.take())
