"""The network for lists of links treats all places alike, and says nothing of places that are empty."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.nn.link_network import LinkNetwork

SEEN = spaces.Dict(
    {"page": spaces.Box(0, 1, (7,)), "links": spaces.Box(0, 1, (5, 6)), "graph": spaces.Box(0, 1, (2, 2), np.float32)}
)


def observation(batch: int = 3) -> dict[str, torch.Tensor]:
    seen = {name: torch.rand(batch, *(space.shape or ())) for name, space in SEEN.items()}
    seen["links"][:, :, 0] = 1
    return seen


def test_what_is_told_of_a_link_goes_with_it_wherever_it_stands() -> None:
    network, seen = LinkNetwork(SEEN, spaces.Discrete(6)), observation()
    before = network(seen)
    order = torch.tensor([3, 1, 4, 0, 2])
    after = network({**seen, "links": seen["links"][:, order]})
    told, rest = before[:, :20].reshape(3, 5, 4), before[:, 20:]
    torch.testing.assert_close(after[:, :20].reshape(3, 5, 4), told[:, order])
    torch.testing.assert_close(after[:, 20:], rest)
    assert not torch.equal(told[:, 0], told[:, 1])


def test_the_page_and_the_graph_bear_on_every_link() -> None:
    network, seen = LinkNetwork(SEEN, spaces.Discrete(6)), observation()
    other = network({**seen, "graph": seen["graph"] + 1})
    assert ((network(seen) - other)[:, :20].reshape(3, 5, 4).abs().sum(2) > 0).all()


def test_nothing_is_told_of_a_place_that_is_empty() -> None:
    network, seen = LinkNetwork(SEEN, spaces.Discrete(6)), observation()
    seen["links"][:, 2] = 0
    told = network(seen)[:, :20].reshape(3, 5, 4)
    assert (told[:, 2] == 0).all()
    assert (told[:, [0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 1, (3,)), *(spaces.Dict({name: spaces.Box(0, 1, (3,))}) for name in ("links", "others"))]
)
def test_observations_without_a_list_of_links_are_refused(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match="needs observations with `links`"):
        LinkNetwork(space, spaces.Discrete(2))
