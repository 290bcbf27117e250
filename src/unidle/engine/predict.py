"""Packs observations, single or in batches, and unpacks actions: what `predict` does around the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.vector.decode import decode_batch
from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout
from unidle.spaces.tree import follow


def pack_observations(layout: ObservationLayout, observation: Any) -> tuple[np.ndarray, int | None]:
    """Packed observations [n, obs_bytes], and n; None if it is a single observation, which gives one row.

    A batch has the structure of the space, with an additional first axis in every array.
    """
    try:
        size = _batch_size(layout, observation)
        packed = np.zeros((1 if size is None else size, layout.obs_bytes), np.uint8)
        if len(packed):
            layout.writer(packed)(0 if size is None else slice(None), observation)  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise UsageError(f"The observation does not fit the space {layout.space} ({error}).") from None
    return packed, size


def _batch_size(layout: ObservationLayout, observation: Any) -> int | None:
    """The length of a batch, or None for a single observation; ValueError for anything else."""
    sizes: set[int | None] = set()
    for leaf in layout.leaves:
        shape = np.shape(follow(observation, leaf.path))
        if shape != leaf.shape and shape[1:] != leaf.shape:
            batched = ", ".join(map(str, ("batch", *leaf.shape)))
            raise ValueError(f"its shape is {shape}, not {leaf.shape}, or ({batched}) for a batch")
        sizes.add(None if shape == leaf.shape else shape[0])
    if len(sizes) > 1:
        raise ValueError("its parts are batches of different sizes")
    return sizes.pop()


def write_masks(
    obs_layout: ObservationLayout,
    actions: ActionLayout,
    packed: np.ndarray,
    size: int | None,
    observation: Any,
    mask: Any,
) -> None:
    """Write the action masks into packed observations; they are in the observation, or given as `mask`."""
    if obs_layout.mask_key is not None:
        mask = observation[MASK]
    if mask is None:
        raise UsageError("This policy was trained with action masks; pass action_mask=info['action_mask'].")
    masks = [mask] if size is None else _rows(mask, size)
    for row, each in zip(obs_layout.mask_view(packed), masks, strict=True):
        row[:] = actions.flatten_mask(each)


def _rows(mask: Any, size: int) -> list[Any]:
    """The masks of a batch: an array with one row each, a list of masks, or a dict or tuple of those."""
    if isinstance(mask, dict):
        parts = {key: _rows(part, size) for key, part in mask.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(size)]
    if isinstance(mask, tuple):
        return list(zip(*(_rows(part, size) for part in mask)))
    if len(mask) != size:
        raise UsageError(f"action_mask has {len(mask)} masks for {size} observations; pass one for each.")
    return list(mask)


def initial_state(
    state: np.ndarray | None, episode_start: Sequence[bool] | np.ndarray | None, size: int | None, width: int
) -> np.ndarray:
    """Recurrent states [n, width]: those of `state`, zero where an episode starts; all zero without `state`."""
    n = 1 if size is None else size
    starts = np.asarray(False if episode_start is None else episode_start, np.bool_)
    if episode_start is not None and starts.shape not in ({(), (1,)} if size is None else {(size,)}):
        raise UsageError(
            f"`episode_start` has shape {starts.shape}, but the number of observations is {n}; pass one value for each."
        )
    if state is None:
        return np.zeros((n, width), np.float32)
    expected = (width,) if size is None else (size, width)
    if np.shape(state) != expected:
        raise UsageError(
            f"`state` has shape {np.shape(state)}, but this policy needs {expected}; pass the state that predict "
            "returned for the previous observations, or None."
        )
    return np.where(starts.reshape(-1, 1), np.float32(0), np.asarray(state, np.float32).reshape(n, width))


def unpack_actions(layout: ActionLayout, flat: np.ndarray, size: int | None) -> Any:
    """The action of the space for one row; for a batch, the structure of the space with arrays [n, …]."""
    return layout.decode(flat[0]) if size is None else decode_batch(layout, flat)
