"""The sampler inside a watched process: its limits, its driver readings, and how its output is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import SOURCE

from unidle.meter.watch.samples import _unescaped, read_processes

INSIDE = SOURCE / "unidle" / "meter" / "watch" / "inside"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sampler module, imported as in a watched process."""
    monkeypatch.syspath_prepend(str(INSIDE))
    import unidle_sampler  # type: ignore[import-not-found]

    return unidle_sampler


@pytest.fixture
def others() -> Iterator[None]:
    """More threads than are sampled, all newer than the main thread."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def sample(sampler: Any) -> list[int] | None:
    """Take a sample in a separate thread, because the sampling thread is not sampled."""
    found: list[list[int] | None] = []
    thread = threading.Thread(target=lambda: found.append(sampler._sample()))
    thread.start()
    thread.join()
    return found[0]


def test_main_thread_is_sampled_among_many_threads(inside: Any, others: None, tmp_path: Path) -> None:
    sampler = inside._Sampler(str(tmp_path), False)
    main = sample(sampler)
    assert main is not None
    assert [sums for key, sums in sampler._stacks.items() if key[0] == 0] == [main]
    assert len({key[0] for key in sampler._stacks}) == inside._MAX_THREADS


def test_full_sampler_drops_new_stacks(
    inside: Any, others: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = inside._Sampler(str(tmp_path), False)
    sample(sampler)
    del sampler._stacks[next(key for key in sampler._stacks if key[0] == 0)]
    monkeypatch.setattr(inside, "_MAX_STACKS", len(sampler._stacks))
    before = len(sampler._stacks), len(sampler._frames)

    def elsewhere() -> list[int] | None:
        return sample(sampler)

    assert elsewhere() is None  # the main thread's stack is new and does not count for another thread's
    assert (len(sampler._stacks), len(sampler._frames)) == before
    assert all(sums[0] > 0 for sums in sampler._stacks.values())


def test_faulthandler_escapes_are_decoded() -> None:
    assert _unescaped(r"/home/\xfc\u4e16\U0001f680/a.py") == "/home/ü世🚀/a.py"
    for text in (r"C:\x41\train.py", r"/\udc80/a.py", r"/\Uffffffff", "/plain.py"):
        assert _unescaped(text) == text


def test_driver_reading_is_assigned_to_stacks_by_time(inside: Any, tmp_path: Path) -> None:
    use, sampler = inside.unidle_utilisation, inside._Sampler(str(tmp_path), False)
    stepping, learning = [0] * 5, [0] * 5
    use.append_readings(str(tmp_path), [(1000, 0.0), (1400, 10.0)])

    def follow(sums: list[int], begun_ns: int, ended_ns: int) -> None:
        sampler._last_ns = ended_ns
        sampler._assign_readings(sums, begun_ns)

    follow(stepping, 1000, 1300)  # three quarters of the reading until 1400
    assert stepping[3:] == [300, 30]
    soon = use._PERIOD_NS
    follow(learning, 1300, 1300 + soon)  # the rest of that reading was dropped
    use.append_readings(str(tmp_path), [(1300 + 2 * soon, 90.0)])
    follow(stepping, 1300 + soon, 1300 + 2 * soon)
    assert learning[3:] == [soon - 100, round(0.9 * (soon - 100))]
    assert stepping[3:] == [300 + soon, 30 + round(0.9 * soon)]
    assert not sampler._recent


def test_partial_reading_is_read_when_complete(inside: Any, tmp_path: Path) -> None:
    use = inside.unidle_utilisation
    reader = use.UtilisationReader(str(tmp_path))
    assert reader.new(0) == []  # without a GPU there is no file
    use.append_readings(str(tmp_path), [(5, 50.0), (7, 70.0)])
    path = tmp_path / use._NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert reader.new(use._PERIOD_NS) == [(0, 5, 50.0)]
    path.write_bytes(whole)
    assert reader.new(use._PERIOD_NS + 1) == []  # polled too soon
    assert reader.new(2 * use._PERIOD_NS) == [(5, 7, 70.0)]


def test_time_before_first_gpu_use_counts_as_idle(inside: Any, others: None, tmp_path: Path) -> None:
    sampler = inside._Sampler(str(tmp_path), False)
    main = sample(sampler)
    assert main is not None
    main[3:] = [5, 5]  # from before the GPU was used
    sampler._switch_to_gpu_activity()
    assert [sums[3:] for sums in sampler._stacks.values()] == [[0, 0]] * len(sampler._stacks)
    assert not sampler._has_driver_readings
    after, now = [0] * 5, sampler._last_ns
    inside.unidle_utilisation.append_readings(str(tmp_path), [(now, 0.0), (now + 100, 50.0)])
    sampler._last_ns = now + 100
    sampler._assign_readings(after, now)
    assert sampler._has_driver_readings
    assert (main[3:], after[3:]) == ([main[0], 0], [100, 50])
    assert sum(sums[3] > 0 for sums in sampler._stacks.values()) == 1  # only the main thread's


def test_repeatedly_lost_windows_fall_back_to_driver_readings(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDLE_WATCH_WINDOWS", "1")
    monkeypatch.setattr(inside.unidle_windows, "try_window", lambda torch: None)
    sampler = inside._Sampler(str(tmp_path), False)
    for _ in range(inside._MAX_LOST):
        assert sampler._has_windows
        sampler._measure_window(threading.Event(), None)
    assert not sampler._has_windows


def test_first_window_follows_first_gpu_use_after_delay(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDLE_WATCH_WINDOWS", "1")
    sampler = inside._Sampler(str(tmp_path), False)
    now_s = time.monotonic() + 1000
    monkeypatch.setattr(inside.time, "monotonic", lambda: now_s)
    sampler._switch_to_gpu_activity()
    assert sampler._next_window_s == now_s + inside._FIRST_WINDOWS_S


def test_failed_sampler_reports_error_and_does_not_restart(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = inside._Sampler(str(tmp_path), False)
    monkeypatch.setattr(sampler, "_sample", lambda: 1 / 0)
    sampler.start()
    sampler._thread.join(10)
    sampler.stop()
    sampler.start()
    assert sampler._thread is None
    sampler.close()
    (process,) = read_processes(tmp_path)
    assert process.failure is not None
    assert "ZeroDivisionError" in process.failure
    assert process.closed_ns is not None
