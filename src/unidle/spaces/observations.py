"""Any observation space as packed bytes of fixed length.

An observation, whatever its structure, is packed into bytes of fixed length: each leaf of the space (Box, Discrete,
MultiDiscrete, MultiBinary) has its own field, and an action mask is one more field. So a batch of observations of any
space is one tensor, [.., obs_bytes] uint8, that is copied to the device once and indexed once per minibatch.

    {"camera": Box(uint8, 84×84×3), "speed": Box(float32, 2), "gear": Discrete(5)}
    packed: | camera 21168 B | gear 4 B + pad | speed 8 B |        every field starts at a multiple of 8

Only NumPy here: worker processes use it without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.spaces.tree import Path, describe_path, follow, rebuild, walk

MASK = "action_mask"


@dataclass(frozen=True)
class Leaf:
    """One field of a packed observation."""

    path: Path  # where it is in the observation: ("sensors", 0)
    space: spaces.Space
    dtype: np.dtype  # as stored: float64 is kept as float32, Discrete as int32
    shape: tuple[int, ...]
    offset: int  # bytes from the start

    @cached_property
    def nbytes(self) -> int:
        """Length of the field without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_image(self) -> bool:
        """Whether a CNN encodes it."""
        space = self.space
        return isinstance(space, spaces.Box) and space.dtype == np.uint8 and image_axes(space.shape) is not None


def image_axes(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(channels, height, width) of an image with channels first, last or none; None for other shapes."""
    if len(shape) == 2 and min(shape) >= 8:
        return 1, *shape
    if len(shape) != 3:
        return None
    first, last = shape[0], shape[2]
    channels, height, width = (first, *shape[1:]) if first < last else (last, *shape[:2])
    return (channels, height, width) if min(height, width) >= 8 else None


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the channels are the last axis of an image of this shape."""
    axes = image_axes(shape)
    return axes is not None and len(shape) == 3 and shape[2] == axes[0] != shape[0]


@dataclass(frozen=True)
class ObservationLayout:
    """The offset of each leaf of an observation space in a packed observation; packs and unpacks observations."""

    space: spaces.Space
    leaves: tuple[Leaf, ...]
    mask_offset: int  # bytes from the start to the action mask
    mask_width: int  # 0: there is no mask
    mask_key: str | None  # key of the mask in a Dict observation; None: the mask comes in `info`
    obs_bytes: int
    parent: ObservationLayout | None = None  # of which this is a part
    frame_stack: int = 1  # the leaves are stacks of so many observations, oldest first (envs/frame_stack.py) …
    stack_axes: tuple[int, ...] = ()  # … along this axis of each leaf: 0 or −1

    @staticmethod
    def of(space: spaces.Space, mask_width: int = 0) -> ObservationLayout:
        """Lay out `space` with a mask of `mask_width` entries; UsageError if a part of the space has no tensor form."""
        mask_key = MASK if mask_width and isinstance(space, spaces.Dict) and MASK in space.spaces else None
        leaves, offset = [], 0
        for path, leaf in walk(space):
            if mask_key is not None and path == (mask_key,):
                continue
            dtype, shape = _storage(leaf, path)
            leaves.append(Leaf(path, leaf, dtype, shape, offset))
            offset = _aligned(offset + leaves[-1].nbytes)
        if offset == 0:
            raise UsageError("The observation space is empty; give it at least one number.")
        return ObservationLayout(space, tuple(leaves), offset, mask_width, mask_key, _aligned(offset + mask_width))

    def part(self, keys: Sequence[str], setting: str) -> ObservationLayout:
        """The layout of these top-level keys in the same packed observations: it reads and writes only their fields.

        UsageError, naming `setting`, if the observation has no such keys.
        """
        if not isinstance(self.space, spaces.Dict):
            raise UsageError(f"`{setting}` needs a Dict observation, and this one is {self.space}; leave it out.")
        names = [name for name in self.space.spaces if name != self.mask_key]
        unknown = [key for key in keys if key not in names]
        if unknown or not keys:
            wrong = ", ".join(map(repr, unknown)) if unknown else "no key"
            raise UsageError(f"`{setting}` names {wrong}; the observation has the keys {', '.join(names)}.")
        if set(keys) == set(names):
            return self
        chosen = spaces.Dict({name: part for name, part in self.space.spaces.items() if name in keys})
        leaves = tuple(leaf for leaf in self.leaves if leaf.path[0] in keys)
        return replace(self, space=chosen, leaves=leaves, parent=self)

    @cached_property
    def dtype(self) -> np.dtype:
        """A packed observation as a NumPy record with one named field per leaf."""
        fields: dict[str, list[Any]] = {"names": [], "formats": [], "offsets": []}
        for index, leaf in enumerate(self.leaves):
            fields["names"].append(str(index))
            fields["formats"].append((leaf.dtype, leaf.shape))
            fields["offsets"].append(leaf.offset)
        if self.mask_width:
            fields["names"].append(MASK)
            fields["formats"].append((np.uint8, (self.mask_width,)))
            fields["offsets"].append(self.mask_offset)
        return np.dtype({**fields, "itemsize": self.obs_bytes})  # type: ignore[call-overload]

    def writer(self, obs: np.ndarray) -> Callable[[int, Any], None]:
        """A function that packs an observation into `obs[i]` ([n, obs_bytes] uint8), casting as it copies."""
        records = obs.view(self.dtype).reshape(len(obs))
        fields = [records[str(index)] for index in range(len(self.leaves))]
        if len(fields) == 1 and not self.leaves[0].path:
            only = fields[0]

            def write_only(index: int, observation: Any) -> None:
                only[index] = observation

            return write_only

        def write(index: int, observation: Any) -> None:
            for leaf, view in zip(self.leaves, fields):
                view[index] = follow(observation, leaf.path)

        return write

    def mask_view(self, obs: np.ndarray) -> np.ndarray:
        """The masks of `obs` ([n, obs_bytes] uint8), as [n, mask_width] uint8."""
        return obs[:, self.mask_offset : self.mask_offset + self.mask_width]

    def float_views(self, obs: np.ndarray) -> list[np.ndarray]:
        """The float leaves of `obs` ([n, obs_bytes] uint8), each as [n, *shape], to check for NaN and infinity."""
        records = obs.view(self.dtype).reshape(len(obs))
        return [records[str(index)] for index, leaf in enumerate(self.leaves) if leaf.dtype.kind == "f"]

    def pack(self, observation: Any) -> np.ndarray:
        """Pack one observation into a new array [obs_bytes]."""
        obs = np.zeros((1, self.obs_bytes), np.uint8)
        self.writer(obs)(0, observation)
        return obs[0]

    def unpack(self, obs: np.ndarray) -> Any:
        """Unpack an observation [obs_bytes] to the structure and dtypes of the space."""
        record = obs.view(self.dtype)[0]
        values = {leaf.path: _as_in_space(leaf.space, record[str(i)]) for i, leaf in enumerate(self.leaves)}
        return rebuild(self.space, values)


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _storage(space: spaces.Space, path: Path) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape in which a leaf is stored."""
    if isinstance(space, spaces.Box):
        if space.dtype.kind == "f":
            return np.dtype(np.float32), space.shape
        if space.dtype.itemsize == 1:
            return np.dtype(np.uint8 if space.dtype == np.bool_ else space.dtype), space.shape
        return np.dtype(np.int32 if space.dtype.itemsize <= 4 and space.dtype != np.uint32 else np.int64), space.shape
    if isinstance(space, spaces.Discrete):
        return np.dtype(np.int64 if abs(int(space.start)) + int(space.n) > 2**31 - 1 else np.int32), ()
    if isinstance(space, spaces.MultiDiscrete):
        most = int(np.max(np.abs(space.start) + space.nvec))
        return np.dtype(np.int64 if most > 2**31 - 1 else np.int32), space.nvec.shape
    if isinstance(space, spaces.MultiBinary):
        return np.dtype(np.uint8), space.shape
    if isinstance(space, spaces.Text):
        raise UsageError(
            f"{describe_path('observation', path)} is a Text space; add --wrapper "
            "gymnasium.wrappers:FlattenObservation, which turns its characters into numbers, or a wrapper of your own."
        )
    raise UsageError(
        f"{describe_path('observation', path)} is a {type(space).__name__} space, which has no fixed-size tensor form; "
        "wrap the environment (--wrapper module:callable) so that it becomes Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict or Tuple."
    )


def _as_in_space(space: spaces.Space, stored: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(stored)
    return np.asarray(stored).astype(space.dtype)
