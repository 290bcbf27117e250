"""Walking nested spaces, and rebuilding and searching nested values."""

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


def test_walk_gives_leaves_in_order_with_paths() -> None:
    assert walk(CAR) == [(("body", 0), SPEED), (("body", 1, "gear"), GEAR), (("lamps",), LAMPS)]


def test_single_leaf_has_empty_path() -> None:
    assert walk(GEAR) == [((), GEAR)]
    assert rebuild(GEAR, {(): 3}) == 3


def test_rebuild_restores_structure_from_leaf_values() -> None:
    values = {("body", 0): "fast", ("body", 1, "gear"): 4, ("lamps",): "on"}
    assert rebuild(CAR, values) == {"body": ("fast", {"gear": 4}), "lamps": "on"}


def test_rebuild_omits_missing_leaves_and_keeps_empty_branches() -> None:
    space = spaces.Dict({"nothing": spaces.Tuple([]), "mask": LAMPS, "speed": SPEED})
    assert rebuild(space, {("speed",): 1}) == {"nothing": (), "speed": 1}


@given(nested(st.sampled_from([SPEED, GEAR, LAMPS])))
def test_follow_and_find_return_rebuilt_values(space: Any) -> None:
    values = {path: number for number, (path, _) in enumerate(walk(space))}
    rebuilt = rebuild(space, values)
    assert {path: follow(rebuilt, path) for path in values} == values
    assert {path: find(rebuilt, path) for path in values} == values


def test_missing_key_is_none_for_find_and_an_error_for_follow() -> None:
    assert find({}, ("body", 0)) is None
    assert find({"body": None}, ("body", 1, "gear")) is None
    with pytest.raises(KeyError):
        follow({}, ("body", 0))
    for search in (find, follow):
        with pytest.raises(IndexError):
            search({"body": ()}, ("body", 0))


def test_describe_path_uses_indexing_syntax() -> None:
    assert describe_path("observation", ("sensors", 0)) == "observation['sensors'][0]"
    assert describe_path("action", ()) == "action"
