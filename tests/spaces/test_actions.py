"""Action layouts: flat actions, discretised boxes and action masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import INTEGERS, boxes, leaf_spaces, nested

from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout

SEEDS = st.integers(0, 2**31 - 1)


def random_row(layout: ActionLayout, rng: np.random.Generator) -> np.ndarray:
    """A valid flat action; the ends of each range occur as often as values between them."""
    heads = [rng.integers(n) for n in layout.nvec]
    low = np.where(np.isfinite(layout.low), layout.low, -100).astype(np.float64)
    high = np.where(np.isfinite(layout.high), layout.high, 100).astype(np.float64)
    low, high = np.minimum(low, high), np.maximum(low, high)
    share = rng.choice([0.0, 1.0, rng.random()], layout.reals)
    reals = np.clip((low + (high - low) * share).astype(np.float32), layout.low, layout.high)
    return np.concatenate([heads, reals]).astype(np.float32)


@given(nested(leaf_spaces()), SEEDS)
def test_flat_actions_decode_to_actions_of_the_space(space: spaces.Space, seed: int) -> None:
    layout = ActionLayout.of(space)
    row = random_row(layout, np.random.default_rng(seed))
    action, fast_action = layout.decode(row), layout.decoder()(row)
    assert space.contains(action)
    assert space.contains(fast_action)
    np.testing.assert_array_equal(layout.encode(fast_action), layout.encode(action))


def test_decoded_action_does_not_alias_its_row() -> None:
    row = np.zeros(2, np.float32)
    action = ActionLayout.of(spaces.Box(-1, 1, (2,))).decoder()(row)
    row[:] = 1.0
    assert not action.any()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_])
def test_box_actions_have_shape_and_dtype_of_the_space(shape: tuple[int, ...], dtype: type) -> None:
    space = spaces.Box(0, 1, shape, dtype)
    for layout in (ActionLayout.of(space), ActionLayout.of(space, discretize=2)):
        action = layout.decode(np.ones(layout.width, np.float32))
        np.testing.assert_array_equal(action, np.ones(shape, dtype), strict=True)


@given(nested(leaf_spaces(dtypes=(np.float32, *INTEGERS))), SEEDS)
def test_encode_inverts_decode(space: spaces.Space, seed: int) -> None:
    layout = ActionLayout.of(space)
    row = random_row(layout, np.random.default_rng(seed))
    rounded = layout.encode(layout.decode(row))  # an integer Box rounds
    np.testing.assert_array_equal(rounded[: layout.heads], row[: layout.heads])
    np.testing.assert_allclose(rounded, row, atol=0.5)
    np.testing.assert_array_equal(layout.encode(layout.decode(rounded)), rounded)


@given(boxes(dtypes=(np.float32,)), SEEDS)
def test_real_actions_round_trip_unchanged(space: spaces.Box, seed: int) -> None:
    layout = ActionLayout.of(space)
    row = random_row(layout, np.random.default_rng(seed))
    np.testing.assert_array_equal(layout.encode(layout.decode(row)), row)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_float64_bounds_are_rounded_inwards(low: float, width: float) -> None:
    space = spaces.Box(low, low + width, (1,), np.float64)
    layout = ActionLayout.of(space)
    assert layout.low.dtype == layout.high.dtype == np.float32
    if layout.low <= layout.high:  # otherwise no float32 lies in the range
        assert space.low <= layout.low.astype(np.float64)
        assert layout.high.astype(np.float64) <= space.high
    # But no further than to the next float32.
    assert np.nextafter(layout.low, np.float32(-np.inf)).astype(np.float64) < space.low
    assert np.nextafter(layout.high, np.float32(np.inf)).astype(np.float64) > space.high


def test_range_without_any_float32_decodes_into_the_space() -> None:
    space = spaces.Box(0.1, 0.1, (1,), np.float64)
    layout = ActionLayout.of(space)
    for row in (layout.low, layout.high):
        assert space.contains(layout.decode(row))


def test_bounds_beyond_float32_are_clamped() -> None:
    layout = ActionLayout.of(spaces.Box(-1e300, 1e300, (1,), np.float64))
    largest = np.finfo(np.float32).max
    assert (layout.low.item(), layout.high.item()) == (-largest, largest)


def test_integer_box_rounds_to_nearest_integer() -> None:
    space = spaces.Box(-3, 4, (4,), np.int16)
    action = ActionLayout.of(space).decode(np.array([-2.6, 0.4, 3.5, 4.0], np.float32))
    assert action.tolist() == [-3, 0, 4, 4]
    assert action.dtype == np.int16


def test_full_int64_range_decodes_without_overflow() -> None:
    limits = np.iinfo(np.int64)
    space = spaces.Box(limits.min, limits.max, (1,), np.int64)
    layout = ActionLayout.of(space)
    assert layout.decode(layout.low).item() == limits.min
    assert layout.decode(layout.high).item() > 2**62


def test_integer_box_without_bounds_is_unbounded() -> None:
    assert ActionLayout.of(spaces.Box(-np.inf, np.inf, (2,), np.int64)).bounded.tolist() == [False, False]
    assert ActionLayout.of(spaces.Box(-5, 5, (2,), np.int64)).bounded.tolist() == [True, True]
    assert ActionLayout.of(spaces.Box(0, np.inf, (1,), np.float32)).bounded.tolist() == [False]


def test_heads_come_before_reals_in_any_space_order() -> None:
    space = spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Discrete(3, start=5), spaces.MultiBinary(2)))
    layout = ActionLayout.of(space)
    assert layout.nvec == (3, 2, 2)
    assert (layout.heads, layout.reals, layout.width, layout.mask_width) == (3, 2, 5, 7)
    reals, category, bits = layout.decode(np.array([2, 1, 0, 0.25, 0.5], np.float32))
    assert reals.tolist() == [0.25, 0.5]
    assert category == 7
    assert bits.tolist() == [1, 0]


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(()), spaces.Box(0, 1, (0,))])
def test_empty_action_space_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match="action space is empty"):
        ActionLayout.of(space)


@pytest.mark.parametrize(
    "part",
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        spaces.OneOf((spaces.Discrete(2),)),
    ],
)
def test_unsupported_space_is_rejected_with_its_path(part: spaces.Space) -> None:
    with pytest.raises(UsageError) as error:
        ActionLayout.of(spaces.Dict({"arm": spaces.Tuple((spaces.Discrete(2), part))}))
    assert str(error.value).startswith(f"action['arm'][1] is a {type(part).__name__} space, ")


# -- discretize --------------------------------------------------------------------------------------------------------


@given(boxes(unbounded=False), st.integers(2, 12))
def test_bins_cover_the_range_and_stay_inside(space: spaces.Box, bins: int) -> None:
    layout = ActionLayout.of(space, discretize=bins)
    assert layout.nvec == (bins,) * int(np.prod(space.shape))
    assert layout.reals == 0
    actions = [layout.decode(np.full(layout.width, category, np.float32)) for category in range(bins)]
    np.testing.assert_array_equal(actions[0], space.low)
    np.testing.assert_array_equal(actions[-1], space.high)
    assert all(space.contains(action) for action in actions)


@given(st.integers(2, 200), st.integers(-50, 50))
def test_one_bin_per_integer_gives_each_integer_once(bins: int, low: int) -> None:
    layout = ActionLayout.of(spaces.Box(low, low + bins - 1, (1,), np.int32), discretize=bins)
    values = [layout.decode(np.array([category], np.float32)).item() for category in range(bins)]
    assert values == list(range(low, low + bins))


def test_bins_are_evenly_spaced_and_encode_back() -> None:
    layout = ActionLayout.of(spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64), discretize=5)
    obs = np.array([[i, 4 - i] for i in range(5)], np.float32)
    actions = np.stack([layout.decode(row) for row in obs])
    np.testing.assert_allclose(actions[:, 0], [-1, -0.5, 0, 0.5, 1])
    np.testing.assert_allclose(actions[:, 1], [8, 6, 4, 2, 0])
    np.testing.assert_array_equal([layout.encode(action) for action in actions], obs)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_unbounded_box_cannot_be_discretised(dtype: type) -> None:
    space = spaces.Dict({"push": spaces.Box(-np.inf, np.inf, (2,), dtype)})
    with pytest.raises(UsageError, match=r"^action\['push'\] has no finite bounds.*7 bins; leave out --discretize"):
        ActionLayout.of(space, discretize=7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_missing_bounds_are_set_to_a_limit(dtype: type) -> None:
    low, high = np.array([-np.inf, 1, -np.inf, 1]), np.array([np.inf, np.inf, 7, 3])
    bounds_dtype = np.float32 if dtype is np.float32 else np.float64
    box = spaces.Box(low.astype(bounds_dtype), high.astype(bounds_dtype), dtype=dtype)
    space = spaces.Tuple((spaces.Discrete(3), box))
    layout = ActionLayout.of(space).within(2.0)
    assert layout.low.tolist() == [-2, 1, 3, 1]
    assert layout.high.tolist() == [2, 5, 7, 3]
    assert layout.bounded.all()
    assert layout.low.dtype == layout.high.dtype == np.float32
    assert space.contains(layout.decode(np.array([1, -2, 5, 3, 3], np.float32)))


# -- masks -------------------------------------------------------------------------------------------------------------

GRID = spaces.MultiDiscrete([2, 3])
JOINT = spaces.Dict({"go": spaces.Discrete(3), "how": spaces.Box(-1, 1, (2,)), "lamps": spaces.MultiBinary(2)})
PAIR = spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 2])))


@pytest.mark.parametrize(
    ("space", "mask", "flat"),
    [
        (spaces.Discrete(3), np.array([True, False, True]), [1, 0, 1]),
        (spaces.Discrete(3), [1, 0, 1], [1, 0, 1]),
        (spaces.Discrete(3), np.array([0.0, 2.0, 0.0]), [0, 1, 0]),
        (GRID, np.array([1, 0, 0, 1, 1]), [1, 0, 0, 1, 1]),
        (GRID, (np.array([1, 0]), np.array([0, 1, 1])), [1, 0, 0, 1, 1]),
        (GRID, [[1, 0], [0, 1, 1]], [1, 0, 0, 1, 1]),
        (
            spaces.MultiDiscrete([[2, 3], [1, 2]]),
            (([1, 0], [0, 1, 1]), ([1], np.array([0, 1]))),
            [1, 0, 0, 1, 1, 1, 0, 1],
        ),
        (spaces.MultiBinary(3), np.array([1, 0, 1]), [1, 1, 1, 0, 1, 1]),
        (spaces.MultiBinary(3), (1, 0, 1), [1, 1, 1, 0, 1, 1]),
        (spaces.MultiBinary([2, 1]), np.array([[0], [1]]), [1, 0, 1, 1]),
        (spaces.MultiBinary(2), np.array([0, 1, 1, 1]), [0, 1, 1, 1]),
        (spaces.MultiBinary(2), ([0, 1], [1, 1]), [0, 1, 1, 1]),
        (JOINT, {"go": [1, 0, 1], "lamps": [0, 1]}, [1, 0, 1, 1, 0, 1, 1]),
        (JOINT, {"go": [1, 0, 1], "lamps": None, "how": None}, [1, 0, 1, 1, 1, 1, 1]),
        (JOINT, np.array([1, 0, 1, 1, 0, 1, 1]), [1, 0, 1, 1, 0, 1, 1]),
        (PAIR, (np.array([0, 1]), (np.array([1, 1]), np.array([1, 0]))), [0, 1, 1, 1, 1, 0]),
        (PAIR, np.array([0, 1, 1, 1, 1, 0]), [0, 1, 1, 1, 1, 0]),
        (PAIR, (None, [1, 0, 0, 1]), [1, 1, 1, 0, 0, 1]),
        (spaces.Dict({"only": spaces.Discrete(2)}), np.array([0, 1]), [0, 1]),
        (spaces.Tuple((spaces.Box(0, 1), spaces.Box(0, 1))), ({}, {}), []),
    ],
)
def test_mask_is_accepted_in_every_form(space: spaces.Space, mask: Any, flat: list[int]) -> None:
    flat_mask = ActionLayout.of(space).flatten_mask(mask)
    assert flat_mask.dtype == np.uint8
    assert flat_mask.tolist() == flat


def test_discretised_box_is_masked_per_bin() -> None:
    layout = ActionLayout.of(spaces.Box(-1, 1, (2,)), discretize=3)
    assert layout.flatten_mask(([1, 1, 0], [0, 1, 1])).tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("space", "mask", "sizes"),
    [
        (spaces.Discrete(3), np.ones(4), (4, 3)),
        (GRID, np.ones(6), (6, 5)),
        (spaces.MultiBinary(3), np.ones(4), (4, 6)),
        (JOINT, np.ones(5), (5, 7)),
        (PAIR, ([1, 1], np.ones(3)), (3, 4)),
        (GRID, ([1, 1, 1],), (3, 5)),
    ],
)
def test_mask_of_wrong_size_is_rejected_with_both_sizes(space: spaces.Space, mask: Any, sizes: tuple[int, int]) -> None:
    actual, expected = sizes
    with pytest.raises(UsageError, match=rf"^action_mask has {actual} entries\D+{expected}\b.*fix the mask"):
        ActionLayout.of(space).flatten_mask(mask)


def test_mask_with_wrong_head_sizes_is_rejected() -> None:
    with pytest.raises(UsageError, match="action_mask has 3 entries for head 0, which has 2"):
        ActionLayout.of(GRID).flatten_mask((np.ones(3), np.ones(2)))


@pytest.mark.parametrize("mask", [(np.ones(2),), {0: np.ones(2), 1: 7}])
def test_mask_with_wrong_structure_is_rejected(mask: Any) -> None:
    with pytest.raises(UsageError, match=r"^action_mask has "):
        ActionLayout.of(PAIR).flatten_mask(mask)


@pytest.mark.parametrize(
    ("mask", "head"), [([1, 1, 1, 1, 1], None), ([0, 1, 0, 0, 1], None), ([0, 0, 1, 1, 1], 0), ([1, 0, 0, 0, 0], 1)]
)
def test_empty_head_finds_head_without_allowed_actions(mask: list[int], head: int | None) -> None:
    layout = ActionLayout.of(GRID)
    assert layout.empty_head(layout.flatten_mask(mask)) == head


def test_head_with_256_allowed_actions_is_not_empty() -> None:
    layout = ActionLayout.of(spaces.Discrete(256))
    assert layout.empty_head(np.ones(256, np.uint8)) is None


def test_action_without_heads_has_no_empty_head() -> None:
    layout = ActionLayout.of(spaces.Box(-1, 1, (2,)))
    assert layout.mask_width == 0
    assert layout.empty_head(np.ones(0, np.uint8)) is None
