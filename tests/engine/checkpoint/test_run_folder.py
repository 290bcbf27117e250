"""Checkpoints and run folders: atomic writes, safe loading, locking and random state."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SOURCE

from unidle.config import Config
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import TrainingError, UsageError
from unidle.rng import random_state, restore_random_state


class Bomb:
    """Creates a folder when unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


class Unwritable:
    """Fails while being pickled, like a disk that runs full in the middle of the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise OSError(errno.ENOSPC, "No space left on device")


def new_folder(path: Path) -> RunFolder:
    return RunFolder.create(path / "run", Config())


# -- writing ---------------------------------------------------------------------------------------------------------


def test_saved_checkpoint_loads_unchanged(tmp_path: Path) -> None:
    state = {"weights": torch.randn(5), "step": 3, "list": [1, 2.5, "x", None], "nested": {"flag": torch.tensor(True)}}
    save_checkpoint(tmp_path / "a.pt", state)
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert torch.equal(loaded["weights"], state["weights"])
    assert loaded["list"] == state["list"]
    assert (loaded["step"], bool(loaded["nested"]["flag"])) == (3, True)


def test_failed_write_keeps_previous_checkpoint(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    old = folder.save({"step": 1, "weights": torch.ones(1000)}, 1, keep=2)
    for step in (1, 2):
        with pytest.raises(TrainingError, match=r"\(No space left on device\); fix that, then resume from the last"):
            folder.save({"weights": torch.zeros(1000), "bad": Unwritable()}, step, keep=2)
    assert list(folder.checkpoints.iterdir()) == [old]
    assert torch.equal(load_checkpoint(old)["weights"], torch.ones(1000))


def test_file_size_limit_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "step-000000000001.pt"
    program = f"""
import pathlib, resource, signal, torch
from unidle.engine.checkpoint.checkpoint_file import save_checkpoint
from unidle.errors import TrainingError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_checkpoint(pathlib.Path({str(path)!r}), {{"weights": torch.zeros(100_000)}})
except TrainingError as error:
    print(error)
"""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True)
    assert re.search(r"Cannot write \S+ \(.+\); fix that, then resume", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_kill_during_write_keeps_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-000000000001.pt"
    save_checkpoint(path, {"step": 1})
    program = f"""
import os, pathlib, torch
from unidle.engine.checkpoint.checkpoint_file import save_checkpoint
class Kill:
    def __reduce__(self):
        os.kill(os.getpid(), 9)
save_checkpoint(pathlib.Path({str(path)!r}), {{"step": 2, "weights": torch.zeros(100_000), "end": Kill()}})
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False)
    assert done.returncode == -9
    assert load_checkpoint(path)["step"] == 1


def test_leftover_of_failed_write_is_ignored_and_overwritten(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    (folder.checkpoints / "step-000000000005.4321.tmp").write_bytes(b"half")
    assert folder.saved() == []
    folder.unlock()
    folder.lock()
    assert folder.latest() is None
    folder.save({"step": 5}, 5, keep=1)
    assert load_checkpoint(folder.checkpoints / "step-000000000005.pt")["step"] == 5
    assert [path.suffix for path in folder.checkpoints.iterdir()] == [".pt"]


# -- retention -------------------------------------------------------------------------------------------------------


def test_latest_checkpoints_and_best_are_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for step in (0, 9, 10, 100, 2000):
        folder.save({"step": step}, step, keep=2)
        if step == 9:
            folder.save_best({"step": step})
    assert [load_checkpoint(path)["step"] for path in folder.saved()] == [100, 2000]
    latest = folder.latest()
    assert latest is not None
    assert load_checkpoint(latest)["step"] == 2000
    assert load_checkpoint(folder.best_or_latest())["step"] == 9
    folder.save_best({"step": 2000})
    assert load_checkpoint(folder.best)["step"] == 2000
    assert len(list(folder.checkpoints.iterdir())) == 3


def test_latest_checkpoint_is_used_if_there_is_no_best(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(UsageError, match="has no checkpoint yet; train it with"):
        folder.best_or_latest()
    path = folder.save({"step": 1}, 1, keep=1)
    assert folder.best_or_latest() == path


# -- rejected files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, 2))])
def test_checkpoint_with_code_is_rejected_without_running_it(tmp_path: Path, write: Any) -> None:
    path, marker = tmp_path / "evil.pt", tmp_path / "code-ran"
    write({"format": 1, "weights": Bomb(marker)}, path)
    with pytest.raises(UsageError) as error:
        load_checkpoint(path)
    assert not marker.exists()
    message = str(error.value)
    assert str(path) in message
    assert ("which was not run" in message) == (write is torch.save)
    assert "weights_only" not in message, "the error must not say how to run the code anyway"
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the file was harmless, so this test proves nothing"


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 50, b"PK\x03\x04" + bytes(200), pickle.dumps([1, 2], 2), bytes(99)]
)
def test_invalid_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.pt is not a checkpoint") as error:
        load_checkpoint(path)
    assert "weights_only" not in str(error.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_file_is_rejected_with_one_line(tmp_path: Path, share: float) -> None:
    path = tmp_path / "x.pt"
    save_checkpoint(path, {"weights": torch.randn(2000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match=r"x\.pt is not a checkpoint") as error:
        load_checkpoint(path)
    assert len(str(error.value).splitlines()) == 1


def test_missing_or_other_format_checkpoint_is_rejected(tmp_path: Path) -> None:
    torch.save({"format": 0}, tmp_path / "old.pt")
    with pytest.raises(UsageError, match="use the version that wrote it"):
        load_checkpoint(tmp_path / "old.pt")
    with pytest.raises(UsageError, match="There is no checkpoint"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(UsageError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)


# -- run folder ------------------------------------------------------------------------------------------------------


def test_run_folder_keeps_config_and_cannot_be_created_twice(tmp_path: Path) -> None:
    config = Config().with_values({"env": "CartPole-v1", "n_envs": 3, "net_arch": (7,)}, "test")
    RunFolder.create(tmp_path / "run", config).unlock()
    assert RunFolder.open(tmp_path / "run").config() == config
    with pytest.raises(UsageError, match="--resume"):
        RunFolder.create(tmp_path / "run", config)
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_run_folder_is_locked_until_other_process_exits_or_is_killed(tmp_path: Path) -> None:
    new_folder(tmp_path).unlock()
    program = f"""
import pathlib, sys
from unidle.engine.checkpoint.run_folder import RunFolder
folder = RunFolder.open(pathlib.Path({str(tmp_path / "run")!r}))
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        folder = RunFolder.open(tmp_path / "run")
        with pytest.raises(UsageError, match="Another process is training in"):
            folder.lock()
        other.kill()
        other.wait()
    folder.lock()
    with pytest.raises(UsageError, match="Another process is training in"):
        RunFolder.open(tmp_path / "run").lock()
    folder.unlock()
    RunFolder.open(tmp_path / "run").lock()


def test_unwritable_run_folder_is_rejected(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.unlock()
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").mkdir()
    with pytest.raises(UsageError, match="Cannot write to"):
        folder.lock()


# -- random state ----------------------------------------------------------------------------------------------------


def test_global_random_state_is_restored_from_checkpoint(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.random(),  # noqa: NPY002
            np.random.standard_normal(),  # noqa: NPY002
            torch.rand(()).item(),
            torch.randn(()).item(),
        ]

    draws()  # each generator now caches a second Gaussian, which must be restored too
    save_checkpoint(tmp_path / "a.pt", {"random": random_state()})
    expected = [draws() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert draws() != expected[0]
    restore_random_state(load_checkpoint(tmp_path / "a.pt")["random"])
    assert [draws() for _ in range(3)] == expected


def test_run_folder_that_cannot_be_created_is_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Cannot create the run folder .*; choose another --runs-dir"):
        RunFolder.create(tmp_path / "file" / "run", Config())
