"""Features extractors of Stable-Baselines3, its own and the script's, as networks of unidle's."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.sb3.images import channels_first, has_channels_last

_CLASS, _KWARGS = "features_extractor_class", "features_extractor_kwargs"
_LAYERS = "stable_baselines3.common.torch_layers"
_DEFAULTS = {
    "CnnPolicy": "NatureCNN",
    "MultiInputPolicy": "CombinedExtractor",
}  # without arguments, unidle has the same
_CHANGING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class Extractor:
    """A class and its arguments; without a class, unidle's own encoder."""

    kind: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> NetworkFactory | None:
        """What creates it."""
        if self.kind is None:
            return None
        kind, kwargs = self.kind, self.kwargs
        return lambda observations, actions: _Extractor(kind(channels_first(observations), **kwargs), observations)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `policy_kwargs`."""
        return {} if self.kind is None else {_CLASS: self.kind, _KWARGS: self.kwargs}

    def as_plain(self) -> dict[str, Any] | None:
        """For a file; None if the class is the script's, or unidle's own encoder is used."""
        is_theirs = self.kind is not None and self.kind.__module__ == _LAYERS
        is_plain = all(isinstance(value, bool | int | float | str) for value in self.kwargs.values())
        return {"name": self.kind.__name__, "kwargs": self.kwargs} if is_theirs and is_plain else None

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Extractor:
        """The reverse of `as_plain`."""
        return Extractor(_theirs(plain["name"]), dict(plain["kwargs"]))


def take_extractor(options: dict[str, Any], policy: str | None) -> Extractor:
    """Take the features extractor out of `policy_kwargs`."""
    kind, kwargs = options.pop(_CLASS, None), dict(options.pop(_KWARGS, None) or {})
    if kind is None and kwargs and policy in _DEFAULTS:
        kind = _theirs(_DEFAULTS[policy])
    if kind is None or (not kwargs and kind.__name__ in ("FlattenExtractor", *_DEFAULTS.values())):
        return Extractor()
    return Extractor(kind, kwargs)


def _theirs(name: str) -> Any:
    if name not in _DEFAULTS.values():
        raise UsageError(f"The saved model has an unknown features extractor {name}; pass policy_kwargs to load.")
    try:
        return getattr(import_module(_LAYERS), name)
    except ImportError:
        raise UsageError(
            f"`features_extractor_kwargs` are for {name}, which is Stable-Baselines3's own; run: pip install "
            "stable-baselines3"
        ) from None


class _Extractor(nn.Module):
    """A features extractor of Stable-Baselines3, with the observations that it expects."""

    def __init__(self, module: nn.Module, space: spaces.Space) -> None:
        super().__init__()
        changing = [type(layer).__name__ for layer in module.modules() if isinstance(layer, _CHANGING)]
        if changing:
            raise UsageError(
                f"The features extractor has a {changing[0]}, which is another function while learning than while "
                "acting, but unidle has one for both; leave it out, or use LayerNorm."
            )
        self.module, self._space = module, space

    def forward(self, observation: Any) -> torch.Tensor:
        """Prepare the observation, and extract features."""
        features: torch.Tensor = self.module(_prepared(observation, self._space))
        return features


def _prepared(observation: Any, space: spaces.Space) -> Any:
    """Floats: images from 0 to 1 with channels first, categories one-hot."""
    if isinstance(space, spaces.Dict):
        return {key: _prepared(observation[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return nn.functional.one_hot(observation.long().flatten() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        raise UsageError("A features extractor gets Box, Discrete and MultiBinary observations; flatten yours.")
    if has_channels_last(space):
        observation = observation.movedim(-1, 1)
    is_image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
    return observation.float() / 255.0 if is_image else observation.float()
