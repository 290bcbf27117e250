"""Features for environments that offer a list of links: the same layers encode each of them.

A plain MLP would learn what makes a good link separately for every place in the list. Shared layers learn it once, and
the policy head has a few features of each place to choose by.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError

_CONTEXT, _WIDTH, _PER_LINK = 32, 64, 4  # features of everything but the links; hidden units; features of each link


class LinkNetwork(nn.Module):
    """Encodes `{"links": [places, facts], …}`: features of each link, then of the rest of the observation."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        super().__init__()
        links = observation_space.spaces.get("links") if isinstance(observation_space, spaces.Dict) else None
        if links is None or len(links.shape or ()) != 2:
            raise UsageError("LinkNetwork needs observations with `links` [places, facts]; remove --network.")
        assert isinstance(observation_space, spaces.Dict)
        facts = (links.shape or (0,))[-1]
        self._others = [name for name in observation_space if name != "links"]
        rest = sum(spaces.flatdim(observation_space[name]) for name in self._others)
        self.context = nn.Sequential(nn.Linear(rest, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _CONTEXT), nn.Tanh())
        self.of_link, self.of_context = nn.Linear(facts, _WIDTH), nn.Linear(_CONTEXT, _WIDTH, bias=False)
        self.worth = nn.Sequential(nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _PER_LINK))

    def forward(self, seen: dict[str, Tensor]) -> Tensor:
        """[batch, places × _PER_LINK + _CONTEXT]"""
        context = self.context(torch.cat([seen[name].flatten(1) for name in self._others], 1))
        links = seen["links"]
        features = self.worth(self.of_link(links) + self.of_context(context)[:, None])
        return torch.cat([(features * links[..., :1]).flatten(1), context], 1)  # 0 for an empty place
