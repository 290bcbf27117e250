"""Checkpoints of a data-parallel run: rank 0 writes the file that every command reads, each other rank one beside it.

A rank's file holds everything of that rank: its environments, random numbers and replay buffer, and the weights, which
all ranks have. A checkpoint counts only if every rank's file is there and intact: ranks write at their own pace, and a
job may be killed in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unidle.algos.registry import Algorithm
from unidle.config.files import display_path
from unidle.distributed.ranks import Ranks
from unidle.engine.checkpoint.checkpoint_file import DamagedCheckpointError, load_checkpoint, save_checkpoint
from unidle.engine.checkpoint.no_folder import NoFolder
from unidle.engine.checkpoint.run_folder import RunFolder, part_of
from unidle.errors import TrainingError, UsageError

_OF_RANK = ("return_carry", "experience")  # in an algorithm's state: of this rank's environments only


class RankFolder(NoFolder):
    """The run folder for a rank other than rank 0, which writes only its part of checkpoints."""

    has_checkpoints = True

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        self.path, self.checkpoints = path, path / "checkpoints"
        self._rank = rank

    def save(self, state: dict[str, Any], step: int, keep: int) -> Path:
        """Write this rank's part of a checkpoint; rank 0 drops old ones."""
        path = part_of(self.checkpoints / f"step-{step:012d}.pt", self._rank)
        save_checkpoint(path, state)
        return path

    def save_best(self, state: dict[str, Any]) -> None:
        """Write nothing: rank 0 evaluates."""


def load_together(folder: RunFolder, ranks: Ranks, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The state of this rank in the newest checkpoint that all ranks can read; None if the run has none.

    Of a checkpoint by another number of ranks, that is the state of rank 0.
    """
    names = ranks.from_first(lambda: [path.name for path in reversed(folder.saved())])
    for name in names:
        path = folder.checkpoints / name
        state: dict[str, Any] | None = None
        with ranks.stage():
            if ranks.is_first:
                state = _load(path)
        saved_by, weights = ranks.gather(None if state is None else (state.get("ranks", 1), state.get("weights")))[
            0
        ] or (
            0,
            None,
        )
        with ranks.stage():
            if saved_by and not ranks.is_first:
                state = _load(part_of(path, ranks.rank) if saved_by == ranks.size else path)
                if state is not None and (state.get("ranks", 1), state.get("weights")) != (saved_by, weights):
                    state = None  # left by an earlier attempt
        if ranks.all(state is not None):
            with ranks.stage():
                if ranks.is_first:
                    folder.refuse_edits(state or {})
            return state
        if ranks.is_first:
            say(f"{name} in {display_path(folder.checkpoints)} is damaged, or parts of it are missing.")
    if names:
        with ranks.stage():
            raise UsageError(
                f"All checkpoints in {display_path(folder.checkpoints)} are damaged or incomplete; restore one from a "
                "backup, or start a new run."
            )
    return None


def _load(path: Path) -> dict[str, Any] | None:
    """The state in a checkpoint; None if there is none, or it is damaged: then it no longer counts as kept."""
    if not path.exists():
        return None
    try:
        return load_checkpoint(path)
    except DamagedCheckpointError:
        path.replace(path.with_name(f"{path.name}.damaged"))
        return None


def for_other_ranks(state: dict[str, Any], n_envs: int) -> dict[str, Any]:
    """The state from which another number of ranks continues in new environments, with an empty replay buffer."""
    algo = dict(state["algo"])
    if "return_carry" in algo:
        algo["return_carry"] = torch.zeros(n_envs)
    if "experience" in algo:
        algo["experience"] = {name: value for name, value in algo["experience"].items() if name != "memory"}
    return {**state, "algo": algo}


# -- weights -----------------------------------------------------------------------------------------------------------


def shared_tensors(algo: Algorithm) -> list[Tensor]:
    """The tensors of an algorithm that are the same on all ranks: networks, optimisers, statistics."""
    return [*_tensors({name: value for name, value in algo.state_dict().items() if name not in _OF_RANK})]


def weights_digest(algo: Algorithm) -> str:
    """A hash of `shared_tensors`, equal only if every bit is."""
    digest = hashlib.sha256()
    for tensor in shared_tensors(algo):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_equal_weights(ranks: Ranks, algo: Algorithm, step: int) -> None:
    """TrainingError on all ranks if their weights differ by a bit."""
    digests = ranks.gather(weights_digest(algo))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    with ranks.stage():
        if other is not None:
            raise TrainingError(
                f"The weights of rank {other} differ from those of rank 0 at step {step:,}, so the job ends; the last "
                "checkpoint is kept. Buffers of a custom network that learn on their own, such as those of batch "
                "normalisation, are not reduced."
            )


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for part in state.values():
            yield from _tensors(part)
