"""The run folder and its checkpoints: written atomically, loaded without unpickling code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

import numpy as np
import torch

from unidle.config import Config
from unidle.config.files import load_yaml, refuse_second_run, run_config_file
from unidle.errors import UsageError, WriteError

_FORMAT = 2  # raise it whenever older checkpoints can no longer be resumed
_WRITTEN_BY = {1: "0.1.0"}  # format → the last version that wrote it
_LOCK_PATIENCE_S = 0.1  # a dashboard that checks whether the run is training holds the lock for microseconds
_NAME = re.compile(r"step-(\d+)\.pt")
# In torch's messages when a file cannot be written.
_UNWRITTEN = re.compile("inline_container|PytorchStreamWriter|Parent directory")


class RunFolder:
    """`runs/<name>/`: config.yaml, metrics.jsonl, changes.jsonl, tensorboard/, checkpoints/, report.html."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = self.checkpoints / "best.pt"
        self._lock: IO[str] | None = None

    @staticmethod
    def create(path: Path, config: Config) -> RunFolder:
        """A new folder for `config`; UsageError if there is already a run there."""
        refuse_second_run(path)
        folder = RunFolder(path)
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"Cannot create the run folder {path} ({error.strerror}); choose another --runs-dir."
            ) from None
        folder.lock()
        folder.save_config(config)
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The folder of an earlier run; UsageError if it is not one."""
        run_config_file(path)
        folder = RunFolder(path)
        folder.checkpoints.mkdir(exist_ok=True)
        return folder

    def config(self) -> Config:
        """The settings this run was started with."""
        return load_yaml(self.path / "config.yaml")

    def save_config(self, config: Config) -> None:
        """Write config.yaml."""
        write_atomically(self.path / "config.yaml", config.to_yaml().encode())

    def lock(self) -> None:
        """Keep other processes from training in this folder; released when this process ends, however it ends."""
        try:
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"Cannot write to {self.path} ({error.strerror}); copy the run elsewhere.") from None
        deadline = monotonic() + _LOCK_PATIENCE_S
        while not _try_lock(self._lock):
            if monotonic() > deadline:
                raise UsageError(f"Another process is training in {self.path}; wait for it, or stop it.")
            sleep(_LOCK_PATIENCE_S / 20)
        for cut_short in self.checkpoints.glob("*.tmp"):
            cut_short.unlink()  # by a kill; no other process writes here now

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def saved(self) -> list[Path]:
        """Numbered checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*.pt") if _NAME.fullmatch(path.name))

    def save(self, state: dict[str, Any], step: int, keep: int) -> Path:
        """Write a checkpoint and drop all but the latest `keep`."""
        path = self.checkpoints / f"step-{step:012d}.pt"
        save_checkpoint(path, state)
        for old in self.saved()[:-keep]:
            old.unlink()
        return path

    def save_best(self, state: dict[str, Any]) -> None:
        """Write the checkpoint to evaluate and predict with."""
        save_checkpoint(self.best, state)

    def latest(self) -> Path | None:
        """The newest numbered checkpoint."""
        saved = self.saved()
        return saved[-1] if saved else None

    def for_use(self) -> Path:
        """The checkpoint to evaluate or predict with: the best if an evaluation chose one, else the latest."""
        path = self.best if self.best.exists() else self.latest()
        if path is None:
            raise UsageError(f"{self.path} has no checkpoint yet; train it with: unidle train --resume {self.path}")
        return path


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) to `path`: a reader sees the old file or the complete new one."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save({"format": _FORMAT, **state}, temporary)
        _sync(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _UNWRITTEN.search(str(error)):
            raise
        temporary.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else "the disk may be full, or the folder gone"
        raise WriteError(
            f"Cannot write {path} ({why}); fix that, then resume from the last checkpoint with --resume."
        ) from error
    _sync(path.parent)


def load_checkpoint(path: Path, device: torch.device | str = "cpu", *, policy_only: bool = False) -> dict[str, Any]:
    """Read a checkpoint; UsageError if it is not one, or of an older format, unless only the policy is needed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"There is no checkpoint {path}; check the path.") from None
    except pickle.UnpicklingError:  # torch's own message explains how to run the code that may be in it
        raise UsageError(
            f"{path} is not a checkpoint: it contains pickled code, which was not run; use a file that unidle wrote."
        ) from None
    except Exception as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} is not a checkpoint, or is damaged ({reason}); use another one.") from None
    found = state.get("format") if isinstance(state, dict) else None
    if found == _FORMAT or (policy_only and found in _WRITTEN_BY):
        return state
    if found in _WRITTEN_BY:
        old = _WRITTEN_BY[found]
        raise UsageError(
            f"{path} was written by unidle {old}; resume it with that version (this one can load and evaluate its "
            "policy)."
        )
    raise UsageError(f"{path} is not a checkpoint of this version of unidle; use the version that wrote it.")


@contextlib.contextmanager
def weights_that_fit() -> Iterator[None]:
    """Raise UsageError where a checkpoint's weights do not fit the network."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        reason = " ".join(str(error).splitlines()[1].split()) if "\n" in str(error) else str(error)
        raise UsageError(
            f"The checkpoint's weights do not fit the network ({reason.rstrip('.')}); use the --network it was trained "
            "with, unchanged."
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_state() -> dict[str, Any]:
    """The state of the global random generators, which a user's network, environment or callback may use."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(keys), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(words, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the state of the global random generators."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])


def without_replay_buffer(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the replay buffer, which may be most of it."""
    algo = state["algo"]
    if "experience" not in algo:
        return state
    experience = {name: value for name, value in algo["experience"].items() if name != "memory"}
    return {**state, "algo": {**algo, "experience": experience}}
