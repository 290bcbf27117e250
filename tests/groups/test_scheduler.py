"""Taking turns: who may continue, who ends, and what a failure does to the others."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from unidle.engine.turns import Turns
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell
from unidle.groups import scheduler
from unidle.groups.scheduler import Member, take_turns


@pytest.fixture
def bell() -> Iterator[SharedDoorbell]:
    bell = SharedDoorbell()
    yield bell
    bell.close()


class Closed:
    """Records which members were closed, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def member(self, name: str, turns: Turns[None]) -> Member:
        return Member(name, turns, None, lambda: self.names.append(name))


def run(members: list[Member], bell: SharedDoorbell) -> None:
    take_turns(members, SharedPools(len(members), bell, None), yields_core=True)


def test_member_that_waits_lets_the_others_continue(bell: SharedDoorbell) -> None:
    said: list[str] = []

    def waits() -> Turns[None]:
        yield lambda: len(said) >= 3
        said.append("waited")

    def works() -> Turns[None]:
        for number in range(5):
            said.append(f"part {number}")
            yield None

    run([Closed().member("a", waits()), Closed().member("b", works())], bell)
    assert said == ["part 0", "part 1", "part 2", "waited", "part 3", "part 4"]


def test_members_take_turns_one_part_each(bell: SharedDoorbell) -> None:
    said: list[str] = []

    def works(name: str) -> Turns[None]:
        for _ in range(3):
            said.append(name)
            yield None

    run([Closed().member(name, works(name)) for name in "abc"], bell)
    assert said == [*"abc"] * 3


def test_ring_wakes_members_that_all_wait(bell: SharedDoorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_POLL_SECONDS", 60.0)
    has_changed = threading.Event()

    def waits() -> Turns[None]:
        yield has_changed.is_set

    def change() -> None:
        has_changed.set()
        bell.ring()

    timer = threading.Timer(0.2, change)
    began = time.monotonic()
    timer.start()
    run([Closed().member("a", waits()), Closed().member("b", waits())], bell)
    assert 0.2 <= time.monotonic() - began < 30


def test_failed_member_keeps_its_error_and_is_closed_at_once(bell: SharedDoorbell) -> None:
    closed = Closed()
    error = ValueError("no licence")

    def fails() -> Turns[None]:
        yield None
        raise error

    def works() -> Turns[None]:
        yield None
        yield None
        assert closed.names == ["bad"]
        yield None

    bad, good = closed.member("bad", fails()), closed.member("good", works())
    run([bad, good], bell)
    assert (bad.error, good.error) == (error, None)
    assert closed.names == ["bad", "good"]


def test_error_while_closing_does_not_hide_the_first_one(bell: SharedDoorbell) -> None:
    first = ValueError("first")

    def fails() -> Turns[None]:
        raise first
        yield

    def close() -> None:
        raise OSError("second")

    member = Member("a", fails(), None, close)
    run([member], bell)
    assert member.error is first


def test_successors_join_while_the_others_run(bell: SharedDoorbell) -> None:
    closed, said = Closed(), []

    def works(name: str, parts: int) -> Turns[None]:
        for _ in range(parts):
            said.append(name)
            yield None

    def successors(ended: Member) -> list[Member]:
        assert closed.names[-1] == ended.name
        return [closed.member("next", works("next", 2))] if ended.name == "short" else []

    members = [closed.member("short", works("short", 1)), closed.member("long", works("long", 4))]
    take_turns(members, SharedPools(len(members), bell, None), yields_core=True, successors=successors)
    assert said == ["short", "long", "long", "long", "next", "long", "next"]
    assert closed.names == ["short", "long", "next"]


def test_ended_member_no_longer_holds_its_run(bell: SharedDoorbell) -> None:
    class Run:
        def close(self) -> None:
            pass

    def works() -> Turns[None]:
        yield None

    held = Run()
    run_is_gone = weakref.ref(held)
    member = Member("a", works(), None, held.close)
    del held
    run([member], bell)
    assert run_is_gone() is None


def test_interrupt_ends_and_closes_all_members(bell: SharedDoorbell) -> None:
    closed, ended = Closed(), []

    def interrupted() -> Turns[None]:
        yield None
        raise KeyboardInterrupt

    def works() -> Turns[None]:
        try:
            while True:
                yield None
        finally:
            ended.append("works")

    with pytest.raises(KeyboardInterrupt):
        run([closed.member("a", works()), closed.member("b", interrupted())], bell)
    assert ended == ["works"]
    assert sorted(closed.names) == ["a", "b"]


def test_members_are_ended_even_if_one_cannot_be(bell: SharedDoorbell) -> None:
    closed = Closed()

    def interrupted() -> Turns[None]:
        yield None
        raise KeyboardInterrupt

    def refuses() -> Turns[None]:
        try:
            while True:
                yield None
        finally:
            raise ValueError("on_end failed")

    members = [closed.member(name, turns) for name, turns in (("a", refuses()), ("b", refuses()), ("c", interrupted()))]
    with pytest.raises(ValueError, match="on_end failed"):
        run(members, bell)
    assert sorted(closed.names) == ["a", "b", "c"]


def test_member_that_cannot_tell_whether_it_is_ready_fails_alone(bell: SharedDoorbell) -> None:
    error = OSError("device lost")

    def is_ready() -> bool:
        raise error

    def waits() -> Turns[None]:
        yield is_ready
        raise error

    def works() -> Turns[None]:
        for _ in range(3):
            yield None

    failures: list[Exception] = []
    bad = Closed().member("bad", waits())
    bad.on_failure = failures.append
    good = Closed().member("good", works())
    run([bad, good], bell)
    assert failures == [bad.error] == [error]
    assert good.error is None
