"""Settings that may differ between the members of a population, as tensors [member]. At present a run has one member.

Tensors can change after an update was captured as a CUDA graph, so schedules and other settings need no new capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unidle.config import Recipe


def per_member(recipes: Sequence[Recipe], name: str, device: torch.device) -> Tensor:
    """The setting `name` of each member's recipe, [member]; infinity for None, which means no limit."""
    values = [getattr(recipe, name) for recipe in recipes]
    return torch.tensor([float("inf") if value is None else value for value in values], device=device)
