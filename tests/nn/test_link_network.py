"""The network for lists of links treats all links alike and gives no features to empty ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.nn.link_network import LinkNetwork

OBSERVATION_SPACE = spaces.Dict(
    {"page": spaces.Box(0, 1, (7,)), "links": spaces.Box(0, 1, (5, 6)), "graph": spaces.Box(0, 1, (2, 2), np.float32)}
)


def random_observation(batch: int = 3) -> dict[str, torch.Tensor]:
    obs = {name: torch.rand(batch, *(space.shape or ())) for name, space in OBSERVATION_SPACE.items()}
    obs["links"][:, :, 0] = 1
    return obs


def test_link_features_follow_the_order_of_links() -> None:
    network, obs = LinkNetwork(OBSERVATION_SPACE, spaces.Discrete(6)), random_observation()
    before = network(obs)
    order = torch.tensor([3, 1, 4, 0, 2])
    after = network({**obs, "links": obs["links"][:, order]})
    link_features, rest = before[:, :20].reshape(3, 5, 4), before[:, 20:]
    torch.testing.assert_close(after[:, :20].reshape(3, 5, 4), link_features[:, order])
    torch.testing.assert_close(after[:, 20:], rest)
    assert not torch.equal(link_features[:, 0], link_features[:, 1])


def test_page_and_graph_affect_every_link() -> None:
    network, obs = LinkNetwork(OBSERVATION_SPACE, spaces.Discrete(6)), random_observation()
    other = network({**obs, "graph": obs["graph"] + 1})
    assert ((network(obs) - other)[:, :20].reshape(3, 5, 4).abs().sum(2) > 0).all()


def test_empty_links_have_zero_features() -> None:
    network, obs = LinkNetwork(OBSERVATION_SPACE, spaces.Discrete(6)), random_observation()
    obs["links"][:, 2] = 0
    link_features = network(obs)[:, :20].reshape(3, 5, 4)
    assert (link_features[:, 2] == 0).all()
    assert (link_features[:, [0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 1, (3,)), *(spaces.Dict({name: spaces.Box(0, 1, (3,))}) for name in ("links", "others"))]
)
def test_observation_without_links_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match="needs observations with `links`"):
        LinkNetwork(space, spaces.Discrete(2))
