"""Copies of a run's state in host memory: training changes the original while the copy is written."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unidle.config.machine import free_memory

_SMALL_BYTES = 64 << 20  # always fits
_MAX_SHARE = 0.5  # of the free memory, for a copy


def snapshot(state: Any) -> Any:
    """A copy of a checkpoint's state: its tensors, lists and dicts."""
    if isinstance(state, Tensor):
        # A clone of a view has only the elements in view; torch.save would write the view's whole storage.
        return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()
    if isinstance(state, dict):
        return type(state)((name, snapshot(value)) for name, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(snapshot(value) for value in state)
    return state


def fits_in_memory(state: Any) -> bool:
    """Whether there is enough memory for a snapshot: with a large replay buffer there may not be."""
    size = _tensor_bytes(state)
    return size < _SMALL_BYTES or size < _MAX_SHARE * free_memory()


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, (dict, list, tuple)):
        return sum(map(_tensor_bytes, state.values() if isinstance(state, dict) else state))
    return 0
