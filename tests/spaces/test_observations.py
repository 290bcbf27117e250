"""Observation layouts: packing, tensor views, masks and images."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import INTEGERS, leaf_spaces, nested, sample_with_seed

from unidle.errors import UsageError
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.observations import ObservationLayout, image_axes

SEEDS = st.integers(0, 2**31 - 1)


def assert_same(space: spaces.Space, actual: object, expected: object) -> None:
    """Equal in structure, dtype and value; float64 values up to float32 precision."""
    if isinstance(space, spaces.Dict):
        assert isinstance(actual, dict)
        assert set(actual) == set(space.spaces)
        for key, part in space.spaces.items():
            assert_same(part, actual[key], expected[key])
    elif isinstance(space, spaces.Tuple):
        assert isinstance(actual, tuple)
        assert len(actual) == len(space.spaces)
        for part, one, other in zip(space.spaces, actual, expected):
            assert_same(part, one, other)
    else:
        expected = np.asarray(expected)
        if expected.dtype == np.float64:
            expected = expected.astype(np.float32).astype(np.float64)
        assert np.asarray(actual).dtype == space.dtype
        np.testing.assert_array_equal(actual, expected, strict=True)


def field(value: object, path: tuple) -> np.ndarray:
    for key in path:
        value = value[key]
    return np.asarray(value)


@given(nested(leaf_spaces()), SEEDS)
def test_pack_and_unpack_round_trip(space: spaces.Space, seed: int) -> None:
    layout = ObservationLayout.of(space)
    value = sample_with_seed(space, seed)
    row = layout.pack(value)
    assert row.shape == (layout.obs_bytes,)
    assert_same(space, layout.unpack(row), value)


@given(nested(leaf_spaces()), SEEDS)
def test_torch_reads_values_that_numpy_packed(space: spaces.Space, seed: int) -> None:
    layout = ObservationLayout.of(space)
    values = [sample_with_seed(space, seed + i) for i in range(6)]
    obs = torch.from_numpy(np.stack([layout.pack(value) for value in values])).view(2, 3, -1)
    for leaf in layout.leaves:
        tensor = leaf_tensor(obs, leaf)
        assert tensor.shape == (2, 3, *leaf.shape)
        expected = np.stack([field(value, leaf.path) for value in values]).reshape(tensor.shape)
        if expected.dtype.kind == "f":
            expected = expected.astype(np.float32)
        np.testing.assert_array_equal(tensor.numpy(), expected)  # equal values; dtypes may differ


@pytest.mark.parametrize("dtype", [np.bool_, *INTEGERS])
def test_dtype_limits_survive_in_numpy_and_torch(dtype: type) -> None:
    low, high = (0, 1) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    layout = ObservationLayout.of(spaces.Box(low, high, (2,), dtype))
    ends = np.array([low, high], dtype)
    row = layout.pack(ends)
    np.testing.assert_array_equal(layout.unpack(row), ends, strict=True)
    assert leaf_tensor(torch.from_numpy(row), layout.leaves[0]).tolist() == [int(low), int(high)]


def test_leaf_is_a_view_of_its_row() -> None:
    layout = ObservationLayout.of(spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (4,)))))
    obs = torch.zeros(2, layout.obs_bytes, dtype=torch.uint8)
    numbers = leaf_tensor(obs, layout.leaves[1])
    obs.copy_(torch.from_numpy(layout.pack((2, np.array([0.5, -1, 0, 1], np.float32)))))
    assert numbers.tolist() == [[0.5, -1, 0, 1]] * 2


@given(nested(leaf_spaces()))
def test_fields_are_aligned_and_do_not_overlap(space: spaces.Space) -> None:
    layout = ObservationLayout.of(space, mask_width=5)
    ends = [(leaf.offset, leaf.offset + leaf.nbytes) for leaf in layout.leaves]
    ends.append((layout.mask_offset, layout.mask_offset + 5))
    assert all(start % 8 == 0 for start, _ in ends)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= layout.obs_bytes
    assert layout.obs_bytes % 8 == 0


def test_writer_changes_only_its_row() -> None:
    layout = ObservationLayout.of(spaces.Box(-1, 1, (3,)))
    obs = np.zeros((3, layout.obs_bytes), np.uint8)
    layout.writer(obs)(1, np.ones(3, np.float32))
    assert obs[0].sum() == obs[2].sum() == 0
    np.testing.assert_array_equal(layout.unpack(obs[1]), np.ones(3, np.float32))


def test_float_views_cover_all_floats_and_share_memory() -> None:
    real = {"near": spaces.Box(-1, 1, (3,), np.float32), "far": spaces.Box(-1, 1, (2, 2), np.float64)}
    whole = {"eye": spaces.Box(0, 255, (5,), np.uint8), "gear": spaces.Discrete(3), "on": spaces.MultiBinary(2)}
    layout = ObservationLayout.of(spaces.Dict({**real, **whole}), mask_width=3)
    obs = np.full((4, layout.obs_bytes), 255, np.uint8)  # NaN, read as a float
    views = layout.float_views(obs)
    assert [view.shape for view in views] == [(4, 2, 2), (4, 3)]
    assert all(np.isnan(view).all() for view in views)
    layout.writer(obs)(2, {**layout.space.sample(), "near": np.ones(3), "far": np.full((2, 2), 2.0)})
    assert [view[2].ravel().tolist() for view in views] == [[2.0] * 4, [1.0] * 3]
    assert all(np.isnan(view[[0, 1, 3]]).all() for view in views)


def test_mask_has_its_own_field() -> None:
    space = spaces.Box(-1, 1, (3,))
    layout = ObservationLayout.of(space, mask_width=5)
    obs = np.zeros((2, layout.obs_bytes), np.uint8)
    layout.writer(obs)(1, np.ones(3, np.float32))
    layout.mask_view(obs)[1] = [1, 0, 1, 1, 0]
    assert layout.mask_key is None
    assert obs.view(layout.dtype).reshape(2)["action_mask"].tolist() == [[0] * 5, [1, 0, 1, 1, 0]]
    np.testing.assert_array_equal(layout.unpack(obs[1]), np.ones(3, np.float32))


def test_mask_key_of_the_observation_is_not_a_leaf() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(4), "where": spaces.Discrete(9)})
    layout = ObservationLayout.of(space, mask_width=4)
    assert layout.mask_key == "action_mask"
    assert [leaf.path for leaf in layout.leaves] == [("where",)]
    row = layout.pack({"where": 7, "action_mask": np.ones(4, np.int8)})
    assert layout.unpack(row) == {"where": 7}


def test_mask_key_is_an_ordinary_leaf_without_masking() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(4), "where": spaces.Discrete(9)})
    assert [leaf.path for leaf in ObservationLayout.of(space).leaves] == [("action_mask",), ("where",)]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((84, 84, 3), (3, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((84, 96), (1, 84, 96)),
        ((8, 8, 1), (1, 8, 8)),
        ((7, 84, 3), None),  # too small to convolve
        ((7, 9), None),
        ((200,), None),
        ((4, 84, 84, 3), None),
    ],
)
def test_images_are_recognised_by_shape(shape: tuple[int, ...], axes: tuple[int, int, int] | None) -> None:
    assert image_axes(shape) == axes


def test_only_uint8_boxes_are_images() -> None:
    def is_image(space: spaces.Space) -> bool:
        return ObservationLayout.of(space).leaves[0].is_image

    assert is_image(spaces.Box(0, 255, (16, 16, 3), np.uint8))
    assert not is_image(spaces.Box(0, 1, (16, 16, 3), np.float32))
    assert not is_image(spaces.MultiBinary([16, 16, 3]))
    assert not is_image(spaces.Box(0, 255, (16,), np.uint8))


UNSUPPORTED = {
    "Text": spaces.Text(3),
    "Sequence": spaces.Sequence(spaces.Discrete(3)),
    "Graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "OneOf": spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_space_is_rejected_with_its_path(kind: str) -> None:
    space = spaces.Dict({"a": spaces.Tuple((UNSUPPORTED[kind], spaces.Discrete(2))), "b": spaces.Discrete(2)})
    with pytest.raises(UsageError) as error:
        ObservationLayout.of(space)
    assert str(error.value).startswith(f"observation['a'][0] is a {kind} space")
    way_out = "--wrapper gymnasium.wrappers:FlattenObservation" if kind == "Text" else "wrap the environment"
    assert way_out in str(error.value)


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(()), spaces.Box(0, 1, (0,))])
def test_empty_observation_space_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match="observation space is empty"):
        ObservationLayout.of(space)


def test_empty_part_stays_in_the_structure() -> None:
    space = spaces.Dict({"seen": spaces.Discrete(3), "unused": spaces.Dict({})})
    layout = ObservationLayout.of(space)
    assert layout.unpack(layout.pack({"seen": 2, "unused": {}})) == {"seen": 2, "unused": {}}
