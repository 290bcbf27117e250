"""Prioritised replay (Schaul et al. 2016): what surprised is replayed more often, and weighs less each time.

`SumTree`: numbers with their sums, and the sums' sums, kept on the device. Each node has 128 children rather than two,
so that two million leaves are three levels: a handful of kernels up and down instead of twenty-one rounds of them.

`Prioritised` ties it to a `Replay`: leaf i belongs to cell i, and a leaf is above 0 exactly where its cell holds a
transition. Every `add` writes three cells a line (the step's, the final row's and the open one), and the same three
leaves: the first gets the highest priority so far, so that it is seen soon; the others held the oldest transitions, or
nothing, and get 0. An update that comes after its transition was overwritten leaves the 0 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.buffers.replay import Replay, Transitions, restore

_WIDTH = 128  # children of a node


class SumTree:
    """Non-negative numbers, drawn in proportion to their size.

    levels[0] [groups, 128] are the leaves, the last group filled up with zeros; element g of the next level is the sum
    of group g; the last level is one group. Float64: sums over millions of leaves keep the smallest of them.
    """

    def __init__(self, n_leaves: int, device: torch.device) -> None:
        self.levels: list[Tensor] = []
        size = n_leaves
        while size > 1 or not self.levels:
            size = -(-size // _WIDTH)
            self.levels.append(torch.zeros(size, _WIDTH, dtype=torch.float64, device=device))
        self.leaves = self.levels[0].view(-1)[:n_leaves]
        self._child = torch.arange(_WIDTH, device=device)

    @property
    def total(self) -> Tensor:
        """[] the sum of all leaves."""
        return self.levels[-1].sum()

    def update(self, index: Tensor, value: Tensor) -> None:
        """leaves[index] = value, [B] each; where an index comes twice, the largest of its values holds.

        Every sum above is taken anew from its children, never adjusted, so that no error adds up. Groups that come
        twice are written twice with the same sum. (The largest, because which write is last is up to the GPU.)
        """
        self.leaves.index_fill_(0, index, 0.0)
        self.leaves.scatter_reduce_(0, index, value.double(), "amax")
        for below, above in zip(self.levels, self.levels[1:]):
            index = index // _WIDTH
            above.view(-1).index_copy_(0, index, below.index_select(0, index).sum(1))

    def sample(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] leaves, one from each of B equal parts of the total; never one that is 0, unless all are."""
        device = self._child.device
        draws = torch.rand(batch_size, dtype=torch.float64, device=device, generator=generator)
        rest = (torch.arange(batch_size, device=device) + draws) / batch_size * self.total
        node = torch.zeros_like(rest, dtype=torch.long)
        for level in reversed(self.levels):
            children = level.index_select(0, node)  # [B, 128]
            upto = children.cumsum(1)
            # The first child, of those that are not empty, that ends past `rest`. Sums taken in different orders differ
            # in their last digits, so `rest` may lie past them all: then it is the last of those.
            rank = torch.where(upto > rest.unsqueeze(1), 2 * _WIDTH - self._child, self._child)
            child = rank.masked_fill_(children == 0, -1).argmax(1, keepdim=True)
            rest = rest - (upto - children).gather(1, child).squeeze(1)
            node = node * _WIDTH + child.squeeze(1)
        return node


class Prioritised:
    """A replay whose transitions are drawn in proportion to p = (|δ| + ε)^α."""

    def __init__(self, replay: Replay, alpha: float, beta: float, epsilon: float = 1e-6) -> None:
        """`beta` is where the correction begins: a tensor from then on, which the caller moves towards 1."""
        self.replay, self._alpha, self._epsilon = replay, alpha, epsilon
        device = replay.cursor.device
        self.tree = SumTree(replay.n_cells, device)
        self.highest = torch.ones((), dtype=torch.float64, device=device)  # of all p so far
        self.beta = torch.tensor(beta, dtype=torch.float64, device=device)

    @staticmethod
    def bytes_per_place(obs_bytes: int, width: int) -> int:
        """What one unit of capacity costs: a leaf more than a replay's, and its share of the sums."""
        return Replay.bytes_per_place(obs_bytes, width) + 9

    @property
    def count(self) -> Tensor:
        """[] how many transitions there are."""
        return self.replay.count

    @property
    def counters(self) -> list[Tensor]:
        """What a capture that adds or updates must put back after its warm-up."""
        return [*self.replay.counters, self.highest, *self.tree.levels]

    def start(self, obs: Tensor, lines: Tensor | None = None) -> None:
        """As `Replay.start`."""
        self.replay.start(obs, lines)
        self.tree.update(self.replay.cursor, torch.zeros_like(self.replay.cursor))

    def add(
        self,
        actions: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        next_obs: Tensor,
        final_obs: Tensor,
    ) -> None:
        """As `Replay.add`."""
        here = self.replay.cursor.clone()
        self.replay.add(actions, rewards, terminated, truncated, next_obs, final_obs)
        new = self.highest.expand(len(here))
        gone = torch.zeros_like(new)
        cells = torch.cat([here, self.replay.after(here), self.replay.cursor])
        self.tree.update(cells, torch.cat([new, gone, gone]))

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """A batch in proportion to priorities; weights (N P(i))^-β, divided by the largest among them."""
        batch = self.replay.at(self.tree.sample(batch_size, generator))
        # With P(i) = p(i) / total, N and the total are in all of them alike; only the smallest p of the batch is left.
        tiny = torch.finfo(torch.float64).tiny  # keeps an empty memory from 0 / 0
        priority = self.tree.leaves[batch.index].clamp(min=tiny)
        batch.weights.mul_((priority.min() / priority) ** self.beta)
        return batch

    @torch.no_grad()
    def update(self, index: Tensor, errors: Tensor) -> None:
        """New priorities for a batch's transitions, from the TD errors δ [B] they had."""
        value = (errors.double().abs() + self._epsilon) ** self._alpha
        value = torch.where(value.isfinite(), value, self.highest)  # one NaN would be in every sum from then on
        value = torch.where(self.replay.acted[index], value, 0.0)
        self.highest.copy_(torch.maximum(self.highest, value.max()))
        self.tree.update(index, value)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the replay's, and what was learned of its worth."""
        levels = {f"priorities_{depth}": level for depth, level in enumerate(self.tree.levels)}
        return {**self.replay.state_dict(), **levels, "highest": self.highest, "beta": self.beta}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put a checkpoint's values into the tensors that are here."""
        restore(self.state_dict(), state)
