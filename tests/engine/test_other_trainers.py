"""Other trainers on the same cores are found, and only numbers of processes depend on them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from processes import wait_until

import unidle
from unidle.engine import other_trainers as module
from unidle.engine.other_trainers import CoreShare, OtherTrainers

TRAINER = """
import os, sys, time
from pathlib import Path
from unidle.engine.other_trainers import OtherTrainers
folder, busy, cores = sys.argv[1:]
os.sched_getaffinity = lambda pid: set(map(int, cores.split(",")))
with OtherTrainers(Path(folder)) as others:
    if busy:
        others.announce(int(busy))
    print("entered", flush=True)
    time.sleep(100)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that is entered as a trainer, keeps `busy` cores busy, and may use `cores`."""
    started: list[subprocess.Popen[str]] = []

    def start(busy: int | str = "", cores: str = "0,1,2,3,4,5,6,7") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TRAINER, str(tmp_path / "trainers"), str(busy), cores]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "entered\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.fixture
def others(tmp_path: Path) -> Iterator[OtherTrainers]:
    """This process, entered in the same folder."""
    with OtherTrainers(tmp_path / "trainers") as others:
        yield others


def test_lone_trainer_takes_all_cores(others: OtherTrainers) -> None:
    assert others.share() is None


def test_trainers_that_start_together_take_equal_parts(others: OtherTrainers, start: Start) -> None:
    start()
    assert others.share() == CoreShare(4, 8, 1)
    start()
    start()
    assert others.share() == CoreShare(2, 8, 3)


def test_cores_that_others_do_not_use_are_taken(others: OtherTrainers, start: Start) -> None:
    start(busy=1)
    assert others.share() == CoreShare(7, 8, 1)


def test_trainer_that_takes_all_cores_leaves_an_equal_part(others: OtherTrainers, start: Start) -> None:
    start(busy=8)
    assert others.share() == CoreShare(4, 8, 1)


def test_trainers_on_other_cores_do_not_count(others: OtherTrainers, start: Start) -> None:
    start(busy=8, cores="8,9,10,11,12,13,14,15")
    assert others.share() is None
    start(busy=8, cores="6,7,8,9,10,11,12,13")  # two of them are shared
    assert others.share() == CoreShare(6, 8, 1)


def test_trainer_that_was_killed_does_not_count_and_its_entry_is_removed(
    others: OtherTrainers, start: Start, tmp_path: Path
) -> None:
    other = start(busy=4)
    assert len(list((tmp_path / "trainers").iterdir())) == 2
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert others.share() is None
    assert len(list((tmp_path / "trainers").iterdir())) == 1


def test_trainer_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    with OtherTrainers(tmp_path / "trainers"):
        assert len(list((tmp_path / "trainers").iterdir())) == 1
    assert list((tmp_path / "trainers").iterdir()) == []


def test_process_that_an_environment_forks_does_not_keep_the_entry_alive(others: OtherTrainers, tmp_path: Path) -> None:
    with OtherTrainers(tmp_path / "trainers"):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        child.start()
        assert others.share() is not None
    try:
        assert others.share() is None
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cores": 3, "busy": 1}', '{"cores": ["x"], "busy": null}'])
def test_damaged_entry_is_ignored(others: OtherTrainers, tmp_path: Path, text: str) -> None:
    with OtherTrainers(tmp_path / "trainers") as damaged:
        assert damaged._path is not None
        damaged._path.write_text(text)
        assert others.share() is None


@pytest.mark.parametrize("reason", ["writable by others", "a file", "not possible"])
def test_trainer_without_a_private_folder_is_as_if_alone(tmp_path: Path, start: Start, reason: str) -> None:
    start()
    folder = tmp_path / "trainers"
    if reason == "writable by others":
        folder.chmod(0o777)
    elif reason == "a file":
        folder = tmp_path / "file"
        folder.touch()
    else:
        folder = Path("/proc/none")
    with OtherTrainers(folder) as others:
        assert others.share() is None
        others.announce(3)


def test_all_processes_of_a_user_find_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert module._user_folder() == tmp_path / "unidle" / "trainers"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert module._user_folder() == tmp_path / f"unidle-trainers-{os.getuid()}"


# -- a run ------------------------------------------------------------------------------------------------------------


class SlowEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A step takes 2 ms, so that worker processes pay."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action), False, False, {}


def weights(run: unidle.TrainedRun) -> list[torch.Tensor]:
    return [weight.clone() for weight in run.agent.policy.state_dict().values()]


def test_run_beside_another_trainer_says_how_many_workers_it_chose_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], start: Start
) -> None:
    monkeypatch.setattr("unidle.engine.placement.available_cores", lambda: 8)
    monkeypatch.setattr(module, "_user_folder", lambda: tmp_path / "trainers")
    settings: dict[str, Any] = {
        "n_envs": 8, "n_steps": 8, "batch_size": 16, "timesteps": 128, "eval_every": 0, "pin_cores": False,
        "runs_dir": str(tmp_path), "device": "cpu",
    }  # fmt: skip
    alone = unidle.train(SlowEnv, run_name="alone", **settings)
    assert "unidle trainer" not in capfd.readouterr().err
    start()
    beside = unidle.train(SlowEnv, run_name="beside", **settings)
    note = (
        "Found 1 other unidle trainer on these 8 cores: 4 worker processes instead of 8; --workers sets another number."
    )
    assert note in capfd.readouterr().err
    assert all(torch.equal(one, other) for one, other in zip(weights(alone), weights(beside), strict=True))
    chosen = unidle.train(SlowEnv, run_name="chosen", workers=3, **settings)
    assert "Found" not in capfd.readouterr().err
    assert chosen.config.engine.workers == 3


def test_running_trainer_announces_what_it_keeps_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_user_folder", lambda: tmp_path / "trainers")
    found: list[Any] = []

    def look(*_: Any) -> None:
        found.extend(json.loads(path.read_text()) for path in (tmp_path / "trainers").glob("*.json"))

    settings: dict[str, Any] = {"n_envs": 4, "n_steps": 8, "batch_size": 16, "timesteps": 32, "eval_every": 0}
    unidle.train(
        SlowEnv,
        workers=2,
        runs_dir=str(tmp_path),
        device="cpu",
        overlap="strict",
        on_start=[look],
        quiet=True,
        **settings,
    )
    assert [entry["busy"] for entry in found] == [3]
    assert wait_until(lambda: not list((tmp_path / "trainers").iterdir()))
