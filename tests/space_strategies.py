"""Hypothesis strategies for every space that unidle supports."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64)

_SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2)])


@st.composite
def boxes(draw: st.DrawFn, dtypes: tuple = FLOATS + INTEGERS, unbounded: bool = True) -> spaces.Box:
    """Boxes of any dtype and shape, with one bound for all entries or one for each, some of them infinite."""
    dtype, shape = np.dtype(draw(st.sampled_from(dtypes))), draw(_SHAPES)
    if dtype.kind == "f":
        ends = st.floats(-1e4, 1e4, width=dtype.itemsize * 8).map(lambda end: end + 0.0)  # no -0.0
    else:
        limits = np.iinfo(dtype)
        ends = st.integers(max(int(limits.min), -(2**40)), min(int(limits.max), 2**40))
    size = int(np.prod(shape)) if draw(st.booleans()) else 1
    pairs = [sorted(draw(st.tuples(ends, ends))) for _ in range(size)]
    low, high = (np.broadcast_to(np.array(end, dtype), (size,)) for end in zip(*pairs))
    low, high = (np.broadcast_to(end, (int(np.prod(shape)),)).reshape(shape).copy() for end in (low, high))
    if dtype.kind == "f" and unbounded:
        low = np.where(draw(st.booleans()), low, dtype.type(-np.inf))
        high = np.where(draw(st.booleans()), high, dtype.type(np.inf))
    return spaces.Box(low, high, shape, dtype.type)


def discretes() -> st.SearchStrategy[spaces.Discrete]:
    """Discrete spaces, with a start that may be negative or too large for 32 bits."""
    starts = st.sampled_from([0, 0, -3, 5, 2**31 - 1, -(2**40)])
    return st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 7), starts)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    """MultiDiscrete spaces of one or two dimensions, with or without a start."""
    shape = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    size = int(np.prod(shape))
    nvec = np.array(draw(st.lists(st.integers(1, 6), min_size=size, max_size=size))).reshape(shape)
    starts = st.sampled_from([0, -2, 7, 2**31 - 1])
    start = np.array(draw(st.lists(starts, min_size=size, max_size=size))).reshape(shape)
    dtype = np.int64 if (np.abs(start) > 2**20).any() else draw(st.sampled_from([np.int64, np.int32]))
    return spaces.MultiDiscrete(nvec.astype(dtype), dtype=dtype, start=start.astype(dtype))


def multi_binaries() -> st.SearchStrategy[spaces.MultiBinary]:
    """MultiBinary spaces, from a number and from shapes."""
    return st.sampled_from([1, 4, [3], [2, 2], [1, 2, 2]]).map(spaces.MultiBinary)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested Dict and Tuple spaces over these leaves, or a single leaf."""
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.dictionaries(st.sampled_from(["a", "b", "camera"]), children, min_size=1).map(spaces.Dict),
            st.lists(children, min_size=1, max_size=3).map(lambda found: spaces.Tuple(tuple(found))),
        ),
        max_leaves=5,
    )


def leaf_spaces(**box: Any) -> st.SearchStrategy[Any]:
    """Any space except Dict and Tuple; `box` is passed to `boxes`."""
    return st.one_of(boxes(**box), discretes(), multi_discretes(), multi_binaries())


def sample_with_seed(space: spaces.Space, seed: int) -> Any:
    """A sample of the space."""
    space.seed(seed)
    return space.sample()
