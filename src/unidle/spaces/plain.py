"""A space as plain values and back, so that a checkpoint can hold it without pickling."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def space_to_plain(space: spaces.Space) -> dict[str, Any]:
    """A supported space as nested dicts, lists, numbers and text."""
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": [[key, space_to_plain(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [space_to_plain(part) for part in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    assert isinstance(space, spaces.Box), space
    return {
        "kind": "Box",
        "low": _bound(space.low),
        "high": _bound(space.high),
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
        return spaces.Discrete(plain["n"], start=plain["start"], dtype=np.dtype(plain["dtype"]).type)
    if kind == "MultiDiscrete":
        dtype = np.dtype(plain["dtype"])
        return spaces.MultiDiscrete(np.array(plain["nvec"], dtype), start=np.array(plain["start"], dtype), dtype=dtype.type)
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["shape"])
    shape, dtype = tuple(plain["shape"]), np.dtype(plain["dtype"])
    low, high = (np.broadcast_to(np.array(plain[end], dtype), shape) for end in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


def _bound(bound: np.ndarray) -> Any:
    """One number where all are equal (a picture's bounds), else all of them."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
