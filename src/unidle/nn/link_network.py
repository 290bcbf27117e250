"""Features for environments that offer a list of links: the same layers encode each of them.

A plain MLP would have to learn what makes a good link separately for every position in the list. Shared layers learn it
once, and the policy head gets a few features of each link.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError

_CONTEXT, _WIDTH, _PER_LINK = 32, 64, 4  # features of the rest of the observation, hidden units, features of each link


class LinkNetwork(nn.Module):
    """Encodes `{"links": [n, numbers of a link], …}`: features of each link, then of the rest of the observation."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        super().__init__()
        links = observation_space.spaces.get("links") if isinstance(observation_space, spaces.Dict) else None
        if links is None or len(links.shape or ()) != 2:
            raise UsageError("LinkNetwork needs observations with `links` [n, numbers of a link]; remove --network.")
        assert isinstance(observation_space, spaces.Dict)
        per_link = (links.shape or (0,))[-1]
        self._others = [name for name in observation_space if name != "links"]
        rest = sum(spaces.flatdim(observation_space[name]) for name in self._others)
        self.context = nn.Sequential(nn.Linear(rest, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _CONTEXT), nn.Tanh())
        self.of_link, self.of_context = nn.Linear(per_link, _WIDTH), nn.Linear(_CONTEXT, _WIDTH, bias=False)
        self.worth = nn.Sequential(nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _PER_LINK))

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Features [batch, n × _PER_LINK + _CONTEXT]; the first number of a link is 1, or 0 where there is none."""
        context = self.context(torch.cat([observation[name].flatten(1) for name in self._others], 1))
        links = observation["links"]
        features = self.worth(self.of_link(links) + self.of_context(context)[:, None])
        return torch.cat([(features * links[..., :1]).flatten(1), context], 1)
