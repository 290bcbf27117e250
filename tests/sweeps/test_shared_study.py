"""The study of a sweep that several workers share: its lock, and the number of its trials."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

import unidle
from unidle.sweeps import sweep as sweep_module
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.study import Study

GRACE_SECONDS = 1  # 30 outside of tests


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of 12 trials, none of which has started."""
    monkeypatch.chdir(tmp_path)
    unidle.sweep("CartPole-v1", trials=12, seconds=0, run_name="s", timesteps=64, device="cpu", quiet=True)
    return tmp_path / "runs" / "s"


def worker(path: Path, number: int) -> Study:
    folder = SweepFolder.open(path)
    folder.lock(number)
    study = Study(folder)
    study._sweep_lock.grace_period = GRACE_SECONDS
    return study


def test_workers_ask_for_as_many_trials_as_planned(folder: Path) -> None:
    studies = [worker(folder, number) for number in (1, 2)]

    def ask_all(study: Study) -> list[int]:
        asked = []
        while (trial := study.ask()) is not None:
            asked.append(trial.number)
        return asked

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(ask_all, studies)
    assert sorted(first + second) == list(range(12))


def test_worker_that_waits_long_does_not_take_the_lock_of_one_that_lives(folder: Path) -> None:
    busy, waiting = worker(folder, 1), worker(folder, 2)
    is_held = Event()

    def wait() -> bool:
        with waiting.exclusive():
            return is_held.is_set()

    with ThreadPoolExecutor(1) as threads:
        for number in range(6):  # longer than the grace period, all together
            with busy.exclusive():
                is_held.set()
                if not number:
                    was_held = threads.submit(wait)
                time.sleep(0.4)
                is_held.clear()
        assert not was_held.result(timeout=10)


def test_lock_of_a_killed_worker_is_removed(folder: Path) -> None:
    study = worker(folder, 1)
    lock = folder / "sweep.yaml.lock"
    lock.touch()
    started = time.monotonic()
    assert study.ask() is not None
    assert time.monotonic() - started > GRACE_SECONDS
    assert not lock.exists()


def test_page_is_written_without_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = []
    monkeypatch.setattr(
        sweep_module, "write_sweep_page", lambda *_: locked.append((folder / "sweep.yaml.lock").exists())
    )
    unidle.resume_sweep(folder, worker=1, seconds=0, quiet=True)
    assert locked
    assert not any(locked)
