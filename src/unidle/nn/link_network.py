"""Features for an environment that offers a list of things to choose from: each is looked at by the same few layers.

A plain network would have to learn for every place in the list anew what makes a good link. Here what is learned from
one place holds in all of them, and the head that follows has a few numbers for each place to choose by.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError

_CONTEXT, _WIDTH, _TOLD = 32, 64, 4  # numbers: of all that is not in the list; within; told of each thing


class LinkNetwork(nn.Module):
    """Of `{"links": [places, facts], …}`: what each link is worth, and what the rest says."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        super().__init__()
        links = observation_space.spaces.get("links") if isinstance(observation_space, spaces.Dict) else None
        if links is None or len(links.shape or ()) != 2:
            raise UsageError("LinkNetwork needs observations with `links` [places, facts]; leave out --network.")
        assert isinstance(observation_space, spaces.Dict)
        facts = (links.shape or (0,))[-1]
        self._others = [name for name in observation_space if name != "links"]
        rest = sum(spaces.flatdim(observation_space[name]) for name in self._others)
        self.context = nn.Sequential(nn.Linear(rest, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _CONTEXT), nn.Tanh())
        self.of_link, self.of_context = nn.Linear(facts, _WIDTH), nn.Linear(_CONTEXT, _WIDTH, bias=False)
        self.worth = nn.Sequential(nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _TOLD))

    def forward(self, seen: dict[str, Tensor]) -> Tensor:
        """[batch, places × _TOLD + _CONTEXT]"""
        context = self.context(torch.cat([seen[name].flatten(1) for name in self._others], 1))
        links = seen["links"]
        told = self.worth(self.of_link(links) + self.of_context(context)[:, None])
        return torch.cat([(told * links[..., :1]).flatten(1), context], 1)  # nothing is told of a place that is empty
