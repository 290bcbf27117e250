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
    assert repr(one) == repr(other)  # the order of keys too, which the row layout follows
    for a, b in zip(ObservationLayout.of(one).leaves, ObservationLayout.of(other).leaves, strict=True):
        assert (a.path, a.dtype, a.shape, a.offset) == (b.path, b.dtype, b.shape, b.offset)
        if isinstance(a.space, spaces.Box):  # == on a Box only says that bounds are close
            np.testing.assert_array_equal(a.space.low, b.space.low, strict=True)
            np.testing.assert_array_equal(a.space.high, b.space.high, strict=True)
            np.testing.assert_array_equal(a.space.bounded_below, b.space.bounded_below)
            np.testing.assert_array_equal(a.space.bounded_above, b.space.bounded_above)


@given(nested(leaf_spaces()))
def test_a_space_comes_back_from_plain_values_unchanged(space: spaces.Space) -> None:
    assert_equal(space_from_plain(space_to_plain(space)), space)


@given(nested(leaf_spaces()))
def test_plain_values_are_so_plain_that_json_can_carry_them(space: spaces.Space) -> None:
    assert_equal(space_from_plain(json.loads(json.dumps(space_to_plain(space)))), space)


def test_a_dict_keeps_an_order_of_keys_that_is_not_the_alphabet() -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    assert list(space_from_plain(space_to_plain(space)).spaces) == ["z", "a"]


def test_the_bounds_of_a_picture_are_two_numbers_and_not_thousands() -> None:
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
def test_an_integer_box_without_bounds_stays_without(space: spaces.Box) -> None:
    again = space_from_plain(space_to_plain(space))
    assert_equal(again, space)
    assert ActionLayout.of(again).bounded.tolist() == ActionLayout.of(space).bounded.tolist()


@pytest.mark.parametrize("low", [np.array(0), np.array([0, 1])])
def test_a_box_of_bools_comes_back(low: np.ndarray) -> None:
    space = spaces.Box(np.broadcast_to(low, (2,)).astype(bool), np.ones(2, bool), dtype=np.bool_)
    assert_equal(space_from_plain(json.loads(json.dumps(space_to_plain(space)))), space)


@pytest.mark.parametrize("n", [3, [3], [2, 2]])
def test_a_multibinary_space_keeps_its_n(n: int | list[int]) -> None:
    space = spaces.MultiBinary(n)
    assert space_from_plain(space_to_plain(space)) == space
