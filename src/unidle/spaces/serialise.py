"""A space as plain values and back, so that a checkpoint can hold it without pickling."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def space_to_plain(space: spaces.Space) -> dict[str, Any]:
    """A supported space as nested dicts, lists, numbers and strings."""
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": [[key, space_to_plain(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [space_to_plain(part) for part in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "kind": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    assert isinstance(space, spaces.Box), space
    return {
        "kind": "Box",
        "low": _bound(space.low, space.bounded_below, -np.inf),
        "high": _bound(space.high, space.bounded_above, np.inf),
        "shape": list(space.shape),
        "dtype": str(space.dtype),
    }


def space_from_plain(plain: dict[str, Any]) -> spaces.Space:
    """The space that `space_to_plain` described."""
    kind = plain["kind"]
    if kind == "Dict":
        return spaces.Dict([(key, space_from_plain(part)) for key, part in plain["parts"]])
    if kind == "Tuple":
        return spaces.Tuple([space_from_plain(part) for part in plain["parts"]])
    if kind == "Discrete":
        # Older Gymnasium has no dtype argument; there it is always int64.
        dtype_too = {} if plain["dtype"] == "int64" else {"dtype": np.dtype(plain["dtype"]).type}
        return spaces.Discrete(plain["n"], start=plain["start"], **dtype_too)
    if kind == "MultiDiscrete":
        dtype = np.dtype(plain["dtype"])
        return spaces.MultiDiscrete(
            np.array(plain["nvec"], dtype), start=np.array(plain["start"], dtype), dtype=dtype.type
        )
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["n"])
    low, high = (_bound_from_plain(plain[end], plain["dtype"]) for end in ("low", "high"))
    return spaces.Box(low, high, tuple(plain["shape"]), np.dtype(plain["dtype"]).type)


def _bound(bound: np.ndarray, given: np.ndarray, infinity: float) -> Any:
    """A bound as one number if all are equal (as for images), else as a list; infinite where it is not bounded."""
    if not given.all():
        bound = np.where(given, bound.astype(np.float64), infinity)
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()


def _bound_from_plain(plain: Any, dtype: str) -> Any:
    if not isinstance(plain, list):
        return int(plain) if isinstance(plain, bool) else plain  # Gymnasium takes 0 and 1 even for a Box of bools
    flat = np.array(plain)
    # An integer Box accepts infinity as "no bound"; an integer array could not hold it.
    return flat if np.dtype(dtype).kind in "iu" and np.isinf(flat).any() else flat.astype(dtype)
