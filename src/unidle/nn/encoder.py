"""From rows of bytes to features: real numbers normalised, categories one-hot, pictures through a CNN."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError
from unidle.nn.normalise import RunningNorm
from unidle.nn.trunks import PictureEncoder
from unidle.spaces.observations import Leaf, RowLayout, image_axes

_CLIP = 10.0  # a normalised observation is cut off at so many deviations


def leaf_tensor(rows: Tensor, leaf: Leaf) -> Tensor:
    """One field of rows [.., row_bytes] as a tensor [.., *shape] of its dtype; a view, nothing is copied."""
    dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
    field = rows[..., leaf.offset : leaf.offset + leaf.nbytes].view(dtype)
    return field.reshape(*rows.shape[:-1], *leaf.shape)


class Encoder(nn.Module):
    """Rows [.., row_bytes] → features [.., n_features]."""

    def __init__(self, layout: RowLayout, normalize: bool) -> None:
        super().__init__()
        self._numbers = [leaf for leaf in layout.leaves if not leaf.is_image and isinstance(leaf.space, spaces.Box)]
        self._bits = [leaf for leaf in layout.leaves if isinstance(leaf.space, spaces.MultiBinary)]
        self._classes = [leaf for leaf in layout.leaves if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete))]
        self._pictures = [leaf for leaf in layout.leaves if leaf.is_image]
        self.n_numbers = sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in self._numbers)
        self.norm = RunningNorm(self.n_numbers) if normalize and self.n_numbers else None
        self.cnns = nn.ModuleList(PictureEncoder(leaf.shape, *_axes(leaf)) for leaf in self._pictures)
        # Feature j of the one-hot part says whether component[j] of the classes has value[j].
        component, value = _one_hot_table(self._classes)
        self.register_buffer("_component", component, persistent=False)
        self.register_buffer("_value", value, persistent=False)
        n_bits = sum(int(np.prod(leaf.shape)) for leaf in self._bits)
        self.n_features = self.n_numbers + n_bits + len(value) + sum(cnn.n_features for cnn in self.cnns)  # type: ignore[misc]

    _component: Tensor
    _value: Tensor

    def numbers(self, rows: Tensor) -> Tensor:
        """All Box entries that are no pictures, as float32 [.., n_numbers], not yet normalised."""
        lead = rows.shape[:-1]
        parts = [leaf_tensor(rows, leaf).reshape(*lead, -1).float() for leaf in self._numbers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Encode rows with any leading dimensions."""
        lead = rows.shape[:-1]
        parts: list[Tensor] = []
        if self._numbers:
            numbers = self.numbers(rows)
            parts.append(numbers if self.norm is None else self.norm(numbers).clamp(-_CLIP, _CLIP))
        if self._bits:
            parts += [leaf_tensor(rows, leaf).reshape(*lead, -1).float() for leaf in self._bits]
        if self._classes:
            classes = torch.cat([leaf_tensor(rows, leaf).reshape(*lead, -1).long() for leaf in self._classes], -1)
            parts.append((classes[..., self._component] == self._value).float())
        parts += [cnn(leaf_tensor(rows, leaf)) for leaf, cnn in zip(self._pictures, self.cnns)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def update_norm(self, rows: Tensor) -> None:
        """Take the observations of one iteration into the running statistics."""
        if self.norm is not None:
            self.norm.update(self.numbers(rows).reshape(-1, self.n_numbers))

    def all_finite(self, rows: Tensor) -> Tensor:
        """[..] whether every real number of each row is finite."""
        if not self._numbers:
            return torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        return torch.isfinite(self.numbers(rows)).all(-1)


class CustomEncoder(Encoder):
    """A user's module in the encoder's place: it gets observations in the structure of the space, as tensors."""

    def __init__(self, layout: RowLayout, normalize: bool, module: nn.Module) -> None:
        super().__init__(layout, normalize=False)
        if normalize:
            raise UsageError("normalize_obs does not apply to a network of your own; normalise inside it, or leave it off.")
        self._layout = layout
        self.cnns = nn.ModuleList()
        self.module = module
        with torch.no_grad():
            features = self(torch.zeros(2, layout.row_bytes, dtype=torch.uint8))
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 2:
            raise UsageError("Your network must map a batch of observations to a [batch, features] tensor.")
        self.n_features = features.shape[1]

    def forward(self, rows: Tensor) -> Tensor:
        """Unpack rows [.., row_bytes] to one batch for the user's module, and give its features the shape back."""
        lead = rows.shape[:-1]
        flat = rows.reshape(-1, rows.shape[-1])
        values = {leaf.path: leaf_tensor(flat, leaf) for leaf in self._layout.leaves}
        features: Tensor = self.module(_structured(self._layout.space, (), values))
        return features.reshape(*lead, -1) if isinstance(features, Tensor) else features


def _structured(space: spaces.Space, path: tuple[Any, ...], values: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(space, spaces.Dict):
        parts = {key: _structured(part, (*path, key), values) for key, part in space.spaces.items()}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(space, spaces.Tuple):
        return tuple(_structured(part, (*path, i), values) for i, part in enumerate(space.spaces))
    return values.get(path)


def _axes(leaf: Leaf) -> tuple[int, int, int]:
    axes = image_axes(leaf.shape)
    assert axes is not None
    return axes


def _one_hot_table(classes: list[Leaf]) -> tuple[Tensor, Tensor]:
    """For each one-hot feature, which class component it looks at and the value that turns it on."""
    component: list[int] = []
    value: list[int] = []
    seen = 0
    for leaf in classes:
        space: Any = leaf.space
        sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.ravel()
        starts = np.broadcast_to(space.start, np.shape(sizes)).ravel()
        for size, start in zip(sizes, starts):
            component += [seen] * int(size)
            value += range(int(start), int(start) + int(size))
            seen += 1
    return torch.tensor(component, dtype=torch.long), torch.tensor(value, dtype=torch.long)
