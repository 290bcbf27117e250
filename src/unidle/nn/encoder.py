"""Packed observations → features: normalised numbers, one-hot or embedded categories, images through a CNN."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.distributed.ranks import Ranks
from unidle.errors import UsageError
from unidle.nn.categories import Categories
from unidle.nn.cnn import ImageEncoder
from unidle.nn.normalise import RunningNorm
from unidle.spaces.observations import Leaf, ObservationLayout, image_axes
from unidle.spaces.tree import Path, rebuild

Observation = dict[Path, Tensor]  # a tensor [.., *shape] for each leaf, by its path

CLIP = 10.0  # normalised observations are clipped to ± this many standard deviations
_TORCH_DTYPE = {np.dtype(name): getattr(torch, name) for name in ("float32", "uint8", "int8", "int32", "int64")}


def leaf_tensor(obs: Tensor, leaf: Leaf) -> Tensor:
    """One field of packed observations [.., obs_bytes] as a tensor [.., *shape] of its dtype; a view, not a copy."""
    if not obs.numel():
        obs = obs.new_empty(obs.shape)  # empty NumPy arrays have strides of 0, which cannot be viewed as floats
    field = obs if leaf.nbytes == obs.shape[-1] else obs[..., leaf.offset : leaf.offset + leaf.nbytes]
    field = field.view(_TORCH_DTYPE[leaf.dtype])
    return field if len(leaf.shape) == 1 else field.reshape(*obs.shape[:-1], *leaf.shape)


def pack_obs(observation: Tensor, mask: Tensor | None, layout: ObservationLayout, obs: Tensor) -> None:
    """Write observations [n, *shape] and masks into packed observations [n, obs_bytes].

    For a Dict space, `observation` [n, total size] is the concatenation of the leaves.
    """
    if len(layout.leaves) == 1:
        leaf_tensor(obs, layout.leaves[0]).copy_(observation.reshape(len(obs), *layout.leaves[0].shape))
    else:
        sizes = [math.prod(leaf.shape) for leaf in layout.leaves]
        for leaf, part in zip(layout.leaves, observation.split(sizes, -1)):
            leaf_tensor(obs, leaf).copy_(part.reshape(len(obs), *leaf.shape))
    if mask is not None:
        obs[:, layout.mask_offset : layout.mask_offset + layout.mask_width].copy_(mask)


def _flat(value: Tensor, leaf: Leaf) -> Tensor:
    """[.., *shape] → [.., size]"""
    if len(leaf.shape) == 1:
        return value
    return value.reshape(*value.shape[: value.dim() - len(leaf.shape)], math.prod(leaf.shape))


class Encoder(nn.Module):
    """Packed observations [.., obs_bytes] → features [.., n_features]."""

    def __init__(self, layout: ObservationLayout, normalize: bool, image_kind: str = "nature") -> None:
        """`image_kind` is `ImageEncoder`'s."""
        super().__init__()
        self.layout = layout  # the part of the observation that is encoded
        self._image_kind = image_kind
        self._leaves = layout.leaves
        self._numbers = _numbers(layout)
        self._all_numbers = _numbers(layout.parent or layout)
        self._bits = [leaf for leaf in layout.leaves if isinstance(leaf.space, spaces.MultiBinary)]
        self._classes = [
            leaf for leaf in layout.leaves if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete))
        ]
        self._images = [leaf for leaf in layout.leaves if leaf.is_image]
        self.n_numbers = sum(math.prod(leaf.shape) for leaf in self._numbers)
        self.norm = RunningNorm(self.n_numbers) if normalize and self.n_numbers else None
        self.n_features = self._build()

    def _build(self) -> int:
        """Create the modules that encode; returns the number of features."""
        cnns = [ImageEncoder(leaf.shape, *_axes(leaf), self._image_kind) for leaf in self._images]
        self.cnns = nn.ModuleList(cnns)
        self.categories = Categories(self._classes)
        n_bits = sum(math.prod(leaf.shape) for leaf in self._bits)
        return self.n_numbers + n_bits + self.categories.n_features + sum(cnn.n_features for cnn in cnns)

    @property
    def is_float_vector(self) -> bool:
        """Whether the observation is one float32 array, and the features are its numbers, normalised or not."""
        if self.layout.parent is not None or len(self._leaves) > 1 or not self._numbers:
            return False
        return self._numbers[0].dtype == np.float32

    def forward(self, obs: Tensor) -> Tensor:
        """Encode packed observations with any leading dimensions."""
        return self.encode({leaf.path: leaf_tensor(obs, leaf) for leaf in self._leaves})

    def encode(self, observation: Observation) -> Tensor:
        """Encode an observation given as one tensor per leaf."""
        parts: list[Tensor] = []
        if self._numbers:
            numbers = self._concatenated(observation, self._numbers).float()
            parts.append(numbers if self.norm is None else self.norm(numbers).clamp(-CLIP, CLIP))
        if self._bits:
            parts.append(self._concatenated(observation, self._bits).float())
        if self._classes:
            parts.append(self.categories(self._concatenated(observation, self._classes)))
        parts += [cnn(observation[leaf.path]) for leaf, cnn in zip(self._images, self.cnns)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def _concatenated(observation: Observation, leaves: list[Leaf]) -> Tensor:
        if len(leaves) == 1:
            return _flat(observation[leaves[0].path], leaves[0])
        return torch.cat([_flat(observation[leaf.path], leaf) for leaf in leaves], -1)

    def _raw_numbers(self, obs: Tensor, leaves: list[Leaf]) -> Tensor:
        return self._concatenated({leaf.path: leaf_tensor(obs, leaf) for leaf in leaves}, leaves)

    def update_norm(self, obs: Tensor, ranks: Ranks | None = None) -> None:
        """Update the running statistics with the observations of one iteration, on all `ranks`."""
        if self.norm is not None:
            self.norm.update(self._raw_numbers(obs, self._numbers).reshape(-1, self.n_numbers), ranks)

    def all_finite(self, obs: Tensor) -> Tensor:
        """[..] whether every number of each observation is finite, including parts that are not encoded."""
        if not self._all_numbers:
            return torch.ones(obs.shape[:-1], dtype=torch.bool, device=obs.device)
        numbers = self._raw_numbers(obs, self._all_numbers)
        if numbers.is_cpu:  # torch takes several times as long for a few numbers
            return torch.from_numpy(np.logical_and.reduce(np.isfinite(numbers.numpy()), -1))
        return torch.isfinite(numbers).all(-1)


class CustomEncoder(Encoder):
    """Encodes with the user's module, which gets tensors in the structure of the observation space."""

    def __init__(self, layout: ObservationLayout, normalize: bool, module: nn.Module) -> None:
        super().__init__(layout, normalize=False)
        if normalize:
            raise UsageError(
                "normalize_obs does not apply to a custom network; normalise inside it, or remove normalize_obs."
            )
        self._space = layout.space
        self.module = module
        with torch.no_grad():
            batch = {leaf.path: torch.zeros(2, *leaf.shape, dtype=_TORCH_DTYPE[leaf.dtype]) for leaf in layout.leaves}
            features = self.module(rebuild(layout.space, batch))
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 2:
            raise UsageError("Your network must map a batch of observations to a [batch, features] tensor.")
        self.n_features = features.shape[1]

    def _build(self) -> int:
        """Nothing: the user's module encodes."""
        return 0

    @property
    def is_float_vector(self) -> bool:
        """Always False: the features come from the user's module."""
        return False

    def encode(self, observation: Observation) -> Tensor:
        """Call the user's module on one flat batch, then restore the leading dimensions."""
        first = self._leaves[0]
        lead = observation[first.path].shape[: observation[first.path].dim() - len(first.shape)]
        batch = {leaf.path: observation[leaf.path].reshape(-1, *leaf.shape) for leaf in self._leaves}
        features: Tensor = self.module(rebuild(self._space, batch))
        return features.reshape(*lead, -1) if isinstance(features, Tensor) else features


def _numbers(layout: ObservationLayout) -> list[Leaf]:
    return [leaf for leaf in layout.leaves if not leaf.is_image and isinstance(leaf.space, spaces.Box)]


def _axes(leaf: Leaf) -> tuple[int, int, int]:
    axes = image_axes(leaf.shape)
    assert axes is not None
    return axes
