"""Spaces survive conversion to plain values and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from space_strategies import leaf_spaces, nested

from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.spaces.serialise import space_from_plain, space_to_plain


def assert_equal(one: spaces.Space, other: spaces.Space) -> None:
    assert one == other
    assert repr(one) == repr(other)  # including the order of keys, which the layout follows
    for a, b in zip(ObservationLayout.of(one).leaves, ObservationLayout.of(other).leaves, strict=True):
        assert (a.path, a.dtype, a.shape, a.offset) == (b.path, b.dtype, b.shape, b.offset)
        if isinstance(a.space, spaces.Box):  # Box equality only compares bounds approximately
            np.testing.assert_array_equal(a.space.low, b.space.low, strict=True)
            np.testing.assert_array_equal(a.space.high, b.space.high, strict=True)
            np.testing.assert_array_equal(a.space.bounded_below, b.space.bounded_below)
            np.testing.assert_array_equal(a.space.bounded_above, b.space.bounded_above)


@given(nested(leaf_spaces()))
def test_space_round_trips_through_plain_values(space: spaces.Space) -> None:
    assert_equal(space_from_plain(space_to_plain(space)), space)


@given(nested(leaf_spaces()))
def test_space_round_trips_through_json(space: spaces.Space) -> None:
    assert_equal(space_from_plain(json.loads(json.dumps(space_to_plain(space)))), space)


def test_dict_keeps_its_key_order() -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    assert list(space_from_plain(space_to_plain(space)).spaces) == ["z", "a"]


def test_constant_image_bounds_are_stored_as_two_numbers() -> None:
    plain = space_to_plain(spaces.Box(0, 255, (96, 96, 3), np.uint8))
    assert (plain["low"], plain["high"]) == (0, 255)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,), np.int64),
        spaces.Box(0, np.inf, (2,), np.int32),
        spaces.Box(np.array([0.0, -np.inf]), np.array([9.0, 5.0]), dtype=np.int32),
    ],
)
def test_unbounded_integer_box_stays_unbounded(space: spaces.Box) -> None:
    restored = space_from_plain(space_to_plain(space))
    assert_equal(restored, space)
    assert ActionLayout.of(restored).bounded.tolist() == ActionLayout.of(space).bounded.tolist()


@pytest.mark.parametrize("low", [np.array(0), np.array([0, 1])])
def test_bool_box_round_trips(low: np.ndarray) -> None:
    space = spaces.Box(np.broadcast_to(low, (2,)).astype(bool), np.ones(2, bool), dtype=np.bool_)
    assert_equal(space_from_plain(json.loads(json.dumps(space_to_plain(space)))), space)


@pytest.mark.parametrize("n", [3, [3], [2, 2]])
def test_multibinary_keeps_its_n(n: int | list[int]) -> None:
    space = spaces.MultiBinary(n)
    assert space_from_plain(space_to_plain(space)) == space
