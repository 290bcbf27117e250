"""Any action space as categorical heads and continuous dimensions.

Every supported action space is a product of two kinds of choice:

    Discrete(n)            one head of n categories
    MultiDiscrete(nvec)    one head per entry of nvec, whatever its shape
    MultiBinary(n)         n heads of 2 categories
    Box                    one continuous dimension per entry (or, with `--discretize K`, one head of K bins)
    Dict, Tuple            their parts, one after the other

so a flat action is one float32 vector: the heads' categories first, then the reals. Uses only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.spaces.observations import MASK
from unidle.spaces.tree import Path, describe_path, find, follow, rebuild, walk


@dataclass(frozen=True)
class Part:
    """One leaf of the action space and its columns of the flat action."""

    path: Path
    space: spaces.Space
    columns: slice
    bins: np.ndarray | None  # [bins, *shape] the value of each bin, if a Box is discretised


@dataclass(frozen=True)
class ActionLayout:
    """Converts between flat actions [heads + reals] and actions of the space."""

    space: spaces.Space
    parts: tuple[Part, ...]
    nvec: tuple[int, ...]  # categories of each head
    low: np.ndarray  # [reals] float32, rounded towards the inside, so that a clipped action is in the space
    high: np.ndarray
    bounded: (
        np.ndarray
    )  # [reals] whether both bounds are given; without, low and high of an integer Box are its dtype's

    @staticmethod
    def of(space: spaces.Space, discretize: int | None = None) -> ActionLayout:
        """The layout of `space`; UsageError names an unsupported part."""
        leaves = _leaves(space)
        heads = [(path, leaf) for path, leaf in leaves if discretize or not isinstance(leaf, spaces.Box)]
        reals = [(path, leaf) for path, leaf in leaves if not discretize and isinstance(leaf, spaces.Box)]
        parts: list[Part] = []
        nvec: list[int] = []
        for path, leaf in heads:
            sizes, bins = _categories(leaf, path, discretize)
            parts.append(Part(path, leaf, slice(len(nvec), len(nvec) + len(sizes)), bins))
            nvec += sizes
        # longdouble holds int64 exactly, so that 2**63 - 1 is not rounded up out of its space.
        lows, highs = [np.zeros(0, np.longdouble)], [np.zeros(0, np.longdouble)]
        bounded, start = [np.zeros(0, np.bool_)], len(nvec)
        for path, leaf in reals:
            size = int(np.prod(leaf.shape, dtype=np.int64))
            parts.append(Part(path, leaf, slice(start, start + size), None))
            lows.append(leaf.low.astype(np.longdouble).ravel())
            highs.append(leaf.high.astype(np.longdouble).ravel())
            bounded.append((leaf.bounded_below & leaf.bounded_above).ravel())
            start += size
        if start == 0:
            raise UsageError("The action space is empty; give it at least one action.")
        low, high = np.concatenate(lows), np.concatenate(highs)
        return ActionLayout(
            space, tuple(parts), tuple(nvec), _round_up(low), -_round_up(-high), np.concatenate(bounded)
        )

    @property
    def heads(self) -> int:
        """Number of categorical heads."""
        return len(self.nvec)

    @property
    def reals(self) -> int:
        """Number of continuous dimensions."""
        return len(self.low)

    @property
    def width(self) -> int:
        """Columns of a flat action."""
        return self.heads + self.reals

    @property
    def mask_width(self) -> int:
        """Entries of a full action mask."""
        return sum(self.nvec)

    def within(self, limit: float) -> ActionLayout:
        """A copy with bounds: dimensions without bounds get ±`limit`; those with one bound end 2 × `limit` from it."""
        boxes: list[Any] = [part.space for part in self.parts if part.columns.start >= self.heads]
        below = np.concatenate([np.zeros(0, np.bool_), *(box.bounded_below.ravel() for box in boxes)])
        above = np.concatenate([np.zeros(0, np.bool_), *(box.bounded_above.ravel() for box in boxes)])
        range_ = np.float32(2 * limit)
        low = np.where(below, self.low, np.where(above, self.high - range_, -range_ / 2))
        high = np.where(above, self.high, np.where(below, self.low + range_, range_ / 2))
        return replace(self, low=low, high=high, bounded=np.ones(self.reals, np.bool_))

    def decode(self, row: np.ndarray) -> Any:
        """The action of the space for a flat action (categories, and reals within the bounds)."""
        if not self.parts[0].path:
            return _decode_part(self.parts[0], row)
        return rebuild(self.space, {part.path: _decode_part(part, row) for part in self.parts})

    def decoder(self) -> Callable[[np.ndarray], Any]:
        """`decode`, or what is enough for common spaces: finding out the kind of space would cost more."""
        part = self.parts[0]
        if isinstance(part.space, spaces.Discrete) and not part.path:
            start, as_integer = part.space.start, part.space.dtype.type
            return lambda row: start + as_integer(row[0])
        if part.path or part.bins is not None or not isinstance(part.space, spaces.Box):
            return self.decode
        if part.space.dtype != np.float32 or len(part.space.shape) != 1:
            return self.decode
        return np.ndarray.copy  # the environment may keep the action, while the buffer is overwritten

    def encode(self, action: Any) -> np.ndarray:
        """The flat action for an action of the space."""
        row = np.zeros(self.width, np.float32)
        for part in self.parts:
            row[part.columns] = _encode_part(part, follow(action, part.path))
        return row

    def flatten_mask(self, mask: Any) -> np.ndarray:
        """A user's action mask as [mask_width] uint8, head after head.

        Accepts: one array of all entries in order; an array or tuple per head; for MultiBinary, one entry per bit that
        says whether it may be set; for Dict and Tuple spaces, the same structure with masks as leaves.
        """
        if isinstance(mask, (dict, tuple, list)) and self.parts[0].path:
            flat = [_mask_of_part(part, self._nvec_of(part), _mask_at(mask, part.path)) for part in self.parts]
            return np.concatenate(flat)
        if len(self.parts) == 1:
            return _mask_of_part(self.parts[0], self.nvec, mask)
        return _mask_entries(mask, self.mask_width)

    def _nvec_of(self, part: Part) -> tuple[int, ...]:
        return self.nvec[part.columns]

    def empty_head(self, mask: np.ndarray) -> int | None:
        """The first head without an allowed category in a flat mask, or None."""
        allowed = np.add.reduceat(mask, self._head_starts()) if self.nvec else np.ones(1)
        empty = np.flatnonzero(allowed == 0)
        return int(empty[0]) if empty.size else None

    def _head_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.nvec)[:-1]]).astype(np.int64)


def _leaves(space: spaces.Space) -> list[tuple[Path, Any]]:
    leaves = walk(space)
    for path, leaf in leaves:
        if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
            raise UsageError(
                f"{describe_path('action', path)} is a {type(leaf).__name__} space, which is not supported; "
                "wrap the environment so that it becomes Discrete, MultiDiscrete, MultiBinary, Box, Dict or Tuple."
            )
    return leaves


def _categories(space: Any, path: Path, discretize: int | None) -> tuple[list[int], np.ndarray | None]:
    if isinstance(space, spaces.Discrete):
        return [int(space.n)], None
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()], None
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape)), None
    assert discretize is not None
    if not space.is_bounded():
        raise UsageError(
            f"{describe_path('action', path)} has no finite bounds, so it cannot be divided into {discretize} bins; "
            "leave out --discretize or bound the action space."
        )
    share = np.linspace(0, 1, discretize).reshape(-1, *[1] * len(space.shape))
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    values = low * (1 - share) + high * share
    if space.dtype.kind in "iub":
        values = np.rint(values)  # 100 × 0.29 is 28.999…: a cast alone would lose the 29
    values = np.clip(values.astype(space.dtype), space.low, space.high)
    return [discretize] * int(np.prod(space.shape, dtype=np.int64)), values


def _round_up(bound: np.ndarray) -> np.ndarray:
    """The smallest float32 that is not below `bound`."""
    with np.errstate(over="ignore"):
        rounded = bound.astype(np.float32)
    return np.where(rounded < bound, np.nextafter(rounded, np.float32(np.inf)), rounded).astype(np.float32)


def _decode_part(part: Part, row: np.ndarray) -> Any:
    space, values = part.space, row[part.columns]
    if isinstance(space, spaces.Discrete):
        return space.start + space.dtype.type(values[0])
    if isinstance(space, spaces.MultiDiscrete):
        return values.astype(space.dtype).reshape(space.nvec.shape) + space.start
    if part.bins is not None:
        chosen = values.astype(np.int64).reshape(1, *space.shape)  # type: ignore[misc]
        return np.take_along_axis(part.bins, chosen, 0).reshape(space.shape)
    if space.dtype.kind in "iub":  # type: ignore[union-attr]
        values = np.rint(values)
    elif space.dtype == np.float64:
        # Between close bounds there may be no float32 at all (a joint locked at 0.1).
        values = np.minimum(np.maximum(values, space.low.ravel()), space.high.ravel())  # type: ignore[attr-defined]
    return values.astype(space.dtype).reshape(space.shape)


def _encode_part(part: Part, value: Any) -> np.ndarray:
    space = part.space
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return np.ravel(np.asarray(value) - space.start)
    if part.bins is not None:
        return np.abs(part.bins.astype(np.float64) - np.asarray(value)).argmin(0).ravel()
    return np.ravel(value)


def _mask_at(mask: Any, path: Path) -> Any:
    """The part of a structured mask for the leaf at `path`; None (everything is allowed) if it has no such part."""
    try:
        return find(mask, path)
    except (IndexError, TypeError):
        raise UsageError(
            f"{MASK} has nothing for {describe_path('action', path)}; give it the structure of the action space."
        ) from None


def _mask_of_part(part: Part, nvec: tuple[int, ...], mask: Any) -> np.ndarray:
    """A mask of one leaf as a flat array; None allows everything."""
    width = sum(nvec)
    if mask is None or not nvec:
        return np.ones(width, np.uint8)
    entries = _mask_arrays(mask)
    flat = np.concatenate(entries)
    if isinstance(part.space, spaces.MultiBinary) and flat.size == len(nvec):
        bits = flat != 0
        return np.stack([np.ones_like(bits), bits], 1).ravel().astype(np.uint8)
    if len(entries) == len(nvec) > 1:
        for head, (entry, n) in enumerate(zip(entries, nvec)):
            if entry.size != n:
                raise UsageError(f"{MASK} has {entry.size} entries for head {head}, which has {n}; fix the mask.")
    return _mask_entries(flat, width)


def _mask_arrays(mask: Any) -> list[np.ndarray]:
    """A mask as flat arrays: one array, or one per head if the mask is a (nested) tuple or list of arrays."""
    if isinstance(mask, (tuple, list)) and any(isinstance(entry, (tuple, list, np.ndarray)) for entry in mask):
        return [array for entry in mask for array in _mask_arrays(entry)]
    return [np.ravel(mask)]


def _mask_entries(mask: Any, width: int) -> np.ndarray:
    flat = (np.ravel(mask) != 0).astype(np.uint8)
    if flat.size != width:
        raise UsageError(
            f"{MASK} has {flat.size} entries, but the action space has {width} categories in all; fix the mask."
        )
    return flat
