"""Features of categorical observations: one-hot, or embedded if a component has too many categories for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError
from unidle.spaces.observations import Leaf
from unidle.spaces.tree import describe_path

MAX_ONE_HOT = 4096  # with more categories, a batch of one-hot vectors is large and almost all zeros
MAX_EMBEDDED = 1_000_000
EMBEDDING_WIDTH = 64


class Categories(nn.Module):
    """Values of Discrete and MultiDiscrete leaves [.., components] → features [.., n_features].

    A component with more than `MAX_ONE_HOT` categories is embedded: its category selects a row of a learned table.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        super().__init__()
        components = [component for leaf in leaves for component in _components(leaf)]
        # One-hot feature j is 1 if component component[j] equals value[j].
        small = [(index, size, start) for index, (size, start) in enumerate(components) if size <= MAX_ONE_HOT]
        component = [index for index, size, _ in small for _ in range(size)]
        value = [start + category for _, size, start in small for category in range(size)]
        self.register_buffer("_component", torch.tensor(component, dtype=torch.long), persistent=False)
        self.register_buffer("_value", torch.tensor(value, dtype=torch.long), persistent=False)
        large = [(index, size, start) for index, (size, start) in enumerate(components) if size > MAX_ONE_HOT]
        self._embedded = [(index, start) for index, _, start in large]
        self.tables = nn.ModuleList(nn.Embedding(size, EMBEDDING_WIDTH) for _, size, _ in large)
        self.n_features = len(value) + EMBEDDING_WIDTH * len(large)

    _component: Tensor
    _value: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """One-hot features first, then the embeddings."""
        parts = [(values[..., self._component] == self._value).float()]
        parts += [table(values[..., index] - start) for table, (index, start) in zip(self.tables, self._embedded)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _components(leaf: Leaf) -> list[tuple[int, int]]:
    """Number of categories and first category of each component; UsageError if one is too large to embed."""
    space: Any = leaf.space
    sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.ravel()
    for size in sizes:
        if size > MAX_EMBEDDED:
            raise UsageError(
                f"{describe_path('observation', leaf.path)} has {int(size):,} categories, too many to learn from "
                f"(at most {MAX_EMBEDDED:,}); wrap the environment (--wrapper module:callable) so that it is a Box or "
                "several smaller components."
            )
    return [(int(size), int(start)) for size, start in zip(sizes, np.ravel(space.start))]
