"""What an algorithm takes over from the checkpoint of another run (`--init-from`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def with_parts_of(own: dict[str, Any], other: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The state `own` with the parts `names` of `other`, as far as it has them.

    ValueError names a part whose tensors have other shapes.
    """
    taken = {name: other[name] for name in names if other.get(name)}
    for name, part in taken.items():
        if _shapes(own[name]) != _shapes(part):
            raise ValueError(name)
    return {**own, **taken}


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
