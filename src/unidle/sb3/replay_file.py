"""Replay buffers in files of their own, which are loaded without unpickling code, and what a script sees of one."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unidle.errors import UsageError
from unidle.sb3.errors import ArgumentError
from unidle.sb3.zip_file import File
from unidle.writing import replacing

_KIND = "replay buffer of unidle"


@dataclass(frozen=True)
class ReplayBufferView:
    """How much a replay buffer holds; its transitions stay with the algorithm."""

    buffer_size: int
    n_stored: int
    device: torch.device

    def size(self) -> int:
        """The number of stored transitions."""
        return self.n_stored

    @property
    def full(self) -> bool:
        """Whether the next transition overwrites another."""
        return self.n_stored >= self.buffer_size


def view_of(experience: dict[str, Any], buffer_size: int, device: torch.device) -> ReplayBufferView:
    """A view of the replay buffer in an algorithm's state."""
    memory = experience.get("memory") or {}
    stored = int((memory["entered"] - memory["left"]).sum()) if "entered" in memory else 0
    return ReplayBufferView(buffer_size, stored, device)


def write_replay(file: File, algo: str, experience: dict[str, Any]) -> None:
    """Write a replay buffer; a path without an ending gets .pkl, as in Stable-Baselines3."""
    content = io.BytesIO()
    torch.save({"kind": _KIND, "algo": algo, "experience": experience}, content)
    if not isinstance(file, str | Path):
        file.write(content.getvalue())
        return
    path = _with_ending(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as target:
        target.write(content.getvalue())


def read_replay(file: File, algo: str) -> dict[str, Any]:
    """The replay buffer in a file that `write_replay` wrote."""
    source: Any = file
    if isinstance(file, str | Path):
        source = Path(file) if Path(file).is_file() else _with_ending(file)
        if not source.is_file():
            raise ArgumentError(f"There is no replay buffer {file}; check the path.")
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
        is_known = found["kind"] == _KIND
    except Exception:  # of torch and pickle, many kinds
        is_known = False
    if not is_known:
        raise ArgumentError(
            f"{file} is not a replay buffer of unidle, or is damaged; one of Stable-Baselines3 is pickled code, which "
            "is not read: use a file that save_replay_buffer of this model wrote."
        )
    if found["algo"] != algo:
        raise UsageError(f"{file} is a replay buffer of {found['algo'].upper()}; load it into a model of that.")
    experience: dict[str, Any] = found["experience"]
    return experience


def _with_ending(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix else path.with_name(f"{path.name}.pkl")
