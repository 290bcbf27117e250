"""Checkpoint files: written whole, verified before they are read, loaded without unpickling code.

A file is torch's zip archive, followed by a trailer: a magic number and the SHA-256 of all bytes before the trailer.
Readers of zip archives ignore it.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from os import SEEK_END
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import torch
from torch import nn

from unidle.config.files import display_path
from unidle.errors import UsageError, WriteError
from unidle.writing import replacing

_Loaded = TypeVar("_Loaded")
_FORMAT = 2  # to be increased when older checkpoints can no longer be resumed
_WRITTEN_BY = {1: "0.1.0"}  # format → the last version that wrote it
_MAGIC = b"\nunidle\x02"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_CHUNK_BYTES = 1 << 20


class DamagedCheckpointError(UsageError):
    """A checkpoint file that is not as unidle wrote it; another checkpoint may be intact."""


class _Hashing:
    """Hashes what torch writes to a file, and keeps the error of a failed write: torch raises another one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) to `path`: a reader sees the old file or the complete new one."""
    hashing = None
    try:
        with replacing(path) as file:
            hashing = _Hashing(file)
            torch.save({"format": _FORMAT, **state}, cast(IO[bytes], hashing))
            file.write(_MAGIC + hashing.digest.digest())
    except (OSError, RuntimeError) as error:
        failed = error if isinstance(error, OSError) else hashing and hashing.error
        if not failed:
            raise
        raise WriteError(
            f"Cannot write {display_path(path)} ({failed.strerror})",
            "fix that, then resume from the last checkpoint with --resume",
        ) from error


def first_intact(paths: Sequence[Path], load: Callable[[Path], _Loaded]) -> tuple[_Loaded, list[Path]]:
    """What `load` gives for the first of `paths` that is not damaged, and those before it, which are.

    DamagedCheckpointError if all are.
    """
    damaged: list[Path] = []
    for path in paths:
        try:
            return load(path), damaged
        except DamagedCheckpointError as error:
            damaged.append(path)
            reason = error
    raise reason


def load_checkpoint(path: Path, device: torch.device | str = "cpu", *, policy_only: bool = False) -> dict[str, Any]:
    """Read a checkpoint; DamagedCheckpointError if any bit of it has changed.

    UsageError if it is of an older format, unless only the policy is needed.
    """
    shown, is_signed = display_path(path), False
    try:
        with path.open("rb") as file:
            is_signed = _verify(file)
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        found = state.get("format") if isinstance(state, dict) else None
        if found == _FORMAT and not is_signed:
            raise ValueError("its end is missing")
    except FileNotFoundError:
        raise UsageError(f"There is no checkpoint {shown}; check the path.") from None
    except pickle.UnpicklingError:  # torch's own message explains how to run the code that may be in it
        raise UsageError(
            f"{shown} is not a checkpoint: it contains pickled code, which was not run; use a file that unidle wrote."
        ) from None
    except PermissionError as error:
        raise UsageError(f"{shown} cannot be read ({error.strerror}); make it readable.") from None
    except Exception as error:
        if is_signed:
            raise  # its content is intact: there may be too little memory
        why = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise DamagedCheckpointError(f"{shown} is not a checkpoint, or is damaged ({why}); use another one.") from None
    if found == _FORMAT or (policy_only and found in _WRITTEN_BY):
        return state
    if found in _WRITTEN_BY:
        old = _WRITTEN_BY[found]
        raise UsageError(
            f"{shown} was written by unidle {old}; resume it with that version (this one can load and evaluate its "
            "policy)."
        )
    raise UsageError(f"{shown} is not a checkpoint of this version of unidle; use the version that wrote it.")


def _verify(file: BinaryIO) -> bool:
    """Whether the file has a trailer; ValueError or BadZipFile if its content does not match its checksums."""
    size = file.seek(0, SEEK_END) - _TRAILER_BYTES
    file.seek(max(0, size))
    trailer = file.read()
    if not trailer.startswith(_MAGIC):
        _verify_archive(file)  # unidle 0.1.0 wrote no trailer
        return False
    file.seek(0)
    digest = hashlib.sha256()
    while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    if digest.digest() != trailer[len(_MAGIC) :]:
        raise ValueError("its checksum does not match")
    return True


def _verify_archive(file: BinaryIO) -> None:
    """Check the CRC of each entry."""
    size = file.seek(0, SEEK_END)
    with zipfile.ZipFile(file) as archive:
        # torch compresses nothing; checking an archive that expands to terabytes would take forever.
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise ValueError("its entries are larger than the file")
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"the checksum of {bad} does not match")


@contextlib.contextmanager
def explain_weight_mismatch() -> Iterator[None]:
    """Turn torch's error into a UsageError if a checkpoint's weights do not fit the network."""
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


def refuse_non_finite(policy: nn.Module, path: Path) -> None:
    """UsageError if a loaded policy has NaN or infinite weights, as one that diverged has."""
    weights = dict(policy.named_parameters())
    for name, value in policy.state_dict().items():
        # The buffers of a user's network may be infinite, as those of an attention mask are.
        wrong = ~value.isfinite() if name in weights else value.isnan()
        if bool(wrong.any()):
            raise UsageError(
                f"The policy in {display_path(path)} has NaN or infinite weights ({name}); use another checkpoint, or "
                "train again with a lower learning rate."
            )
