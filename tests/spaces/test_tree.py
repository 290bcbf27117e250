from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import nested

from unidle.spaces.tree import describe_path, find, follow, rebuild, walk

SPEED, GEAR, LAMPS = spaces.Box(-1, 1, (2,)), spaces.Discrete(5), spaces.MultiBinary(3)
CAR = spaces.Dict({"body": spaces.Tuple([SPEED, spaces.Dict({"gear": GEAR})]), "lamps": LAMPS})


def test_leaves_come_in_the_order_of_the_space_with_their_paths() -> None:
    assert walk(CAR) == [(("body", 0), SPEED), (("body", 1, "gear"), GEAR), (("lamps",), LAMPS)]


def test_a_leaf_alone_has_the_empty_path() -> None:
    assert walk(GEAR) == [((), GEAR)]
    assert rebuild(GEAR, {(): 3}) == 3


def test_a_structure_is_rebuilt_from_the_values_of_its_leaves() -> None:
    values = {("body", 0): "fast", ("body", 1, "gear"): 4, ("lamps",): "on"}
    assert rebuild(CAR, values) == {"body": ("fast", {"gear": 4}), "lamps": "on"}


def test_a_dict_is_rebuilt_without_a_leaf_that_has_no_value_and_with_branches_that_are_empty() -> None:
    space = spaces.Dict({"nothing": spaces.Tuple([]), "mask": LAMPS, "speed": SPEED})
    assert rebuild(space, {("speed",): 1}) == {"nothing": (), "speed": 1}


@given(nested(st.sampled_from([SPEED, GEAR, LAMPS])))
def test_what_was_rebuilt_is_found_again_at_each_path(space: Any) -> None:
    values = {path: number for number, (path, _) in enumerate(walk(space))}
    rebuilt = rebuild(space, values)
    assert {path: follow(rebuilt, path) for path in values} == values
    assert {path: find(rebuilt, path) for path in values} == values


def test_only_find_takes_a_missing_key_or_branch_for_none() -> None:
    assert find({}, ("body", 0)) is None
    assert find({"body": None}, ("body", 1, "gear")) is None
    with pytest.raises(KeyError):
        follow({}, ("body", 0))
    for search in (find, follow):
        with pytest.raises(IndexError):
            search({"body": ()}, ("body", 0))


def test_a_path_is_described_as_one_would_write_it() -> None:
    assert describe_path("observation", ("sensors", 0)) == "observation['sensors'][0]"
    assert describe_path("action", ()) == "action"
