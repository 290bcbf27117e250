"""Prioritised replay (Schaul et al. 2016): sample by TD error, with importance weights.

`SumTree`: non-negative numbers with their partial sums, on the device. A node has 128 children instead of two, so two
million leaves take three levels: a handful of kernels up and down the tree instead of 21 rounds.

`Prioritised` adds priorities to a `Replay`: leaf i belongs to cell i and is above 0 exactly where the cell holds a
transition. Every `add` writes three cells per environment (the step's, the final observation's and the open one): the
leaf of the first gets the highest priority so far, so that it is sampled soon; those of the transitions that the others
overwrite (`Replay.lost`) get 0. An update for a transition that has since been overwritten does not change the
0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.buffers.replay import Replay, Transitions, restore

_WIDTH = 128  # children of a node


class SumTree:
    """Non-negative numbers, sampled in proportion to their size.

    levels[0] [groups, 128] are the leaves, the last group padded with zeros; element g of the next level is the sum
    of group g; the last level is one group. In float64, so that sums over millions of leaves do not lose small ones.
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
        """leaves[index] = value, [B] each; a repeated index gets its largest value.

        (The largest, because a GPU writes in no fixed order.) Every sum above is recomputed from its children, never
        adjusted, so rounding errors do not accumulate. A group that occurs twice is written twice, with the same sum.
        """
        self.leaves.index_fill_(0, index, 0.0)
        self.leaves.scatter_reduce_(0, index, value.double(), "amax")
        for below, above in zip(self.levels, self.levels[1:]):
            index = index // _WIDTH
            above.view(-1).index_copy_(0, index, below.index_select(0, index).sum(1))

    def sample(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] leaves, one from each of B equal parts of the total; never one of value 0, unless all are."""
        device = self._child.device
        draws = torch.rand(batch_size, dtype=torch.float64, device=device, generator=generator)
        rest = (torch.arange(batch_size, device=device) + draws) / batch_size * self.total
        node = torch.zeros_like(rest, dtype=torch.long)
        for level in reversed(self.levels):
            children = level.index_select(0, node)  # [B, 128]
            cumulative = children.cumsum(1)
            # The first non-empty child whose running sum exceeds `rest`; the last one if rounding puts `rest` beyond
            # the total.
            rank = torch.where(cumulative > rest.unsqueeze(1), 2 * _WIDTH - self._child, self._child)
            child = rank.masked_fill_(children == 0, -1).argmax(1, keepdim=True)
            rest = rest - (cumulative - children).gather(1, child).squeeze(1)
            node = node * _WIDTH + child.squeeze(1)
        return node


class Prioritised:
    """A replay buffer that samples transitions in proportion to p = (|δ| + ε)^α."""

    def __init__(self, replay: Replay, alpha: float, beta: float, epsilon: float = 1e-6) -> None:
        """`beta` is the initial importance-sampling exponent; the caller anneals the tensor `self.beta` to 1."""
        self.replay, self._alpha, self._epsilon = replay, alpha, epsilon
        device = replay.cursor.device
        self.tree = SumTree(replay.n_cells, device)
        self.highest = torch.ones((), dtype=torch.float64, device=device)  # highest p so far
        self.beta = torch.tensor(beta, dtype=torch.float64, device=device)

    @staticmethod
    def bytes_per_transition(obs_bytes: int, width: int) -> int:
        """Bytes per unit of capacity: those of a `Replay`, a leaf, and its share of the sums."""
        return Replay.bytes_per_transition(obs_bytes, width) + 9

    @property
    def count(self) -> Tensor:
        """[] number of stored transitions."""
        return self.replay.count

    @property
    def counters(self) -> list[Tensor]:
        """Tensors to restore after the warm-up of a captured `add` or `update`."""
        return [*self.replay.counters, self.highest, *self.tree.levels]

    def start(self, obs: Tensor, restarted: Tensor | None = None) -> None:
        """As `Replay.start`."""
        self.replay.start(obs, restarted)
        self.tree.update(self.replay.lost(self.replay.cursor), torch.zeros_like(self.replay.cursor))

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
        zero = torch.zeros_like(new)
        cells = torch.cat([here, self.replay.lost(self.replay.after(here)), self.replay.lost(self.replay.cursor)])
        self.tree.update(cells, torch.cat([new, zero, zero]))

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """A batch sampled by priority; weights (N P(i))^-β, divided by the largest in the batch."""
        batch = self.replay.gather(self.tree.sample(batch_size, generator))
        # With P(i) = p(i) / total, N and the total cancel: only the batch's smallest p remains.
        tiny = torch.finfo(torch.float64).tiny  # avoids 0 / 0 in an empty buffer
        priority = self.tree.leaves[batch.index].clamp(min=tiny)
        batch.weights.mul_((priority.min() / priority) ** self.beta)
        return batch

    @torch.no_grad()
    def update(self, index: Tensor, errors: Tensor) -> None:
        """Set the priorities of sampled transitions from their TD errors δ [B]."""
        value = (errors.double().abs() + self._epsilon) ** self._alpha
        value = torch.where(value.isfinite(), value, self.highest)  # a NaN would spread to all sums
        value = torch.where(self.replay.has_transition[index], value, 0.0)
        self.highest.copy_(torch.maximum(self.highest, value.max()))
        self.tree.update(index, value)

    def state_dict(self) -> dict[str, Tensor]:
        """The replay buffer's state, priorities and β."""
        levels = {f"priorities_{depth}": level for depth, level in enumerate(self.tree.levels)}
        return {**self.replay.state_dict(), **levels, "highest": self.highest, "beta": self.beta}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        restore(self.state_dict(), state)
