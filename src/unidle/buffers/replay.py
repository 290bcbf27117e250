"""What was experienced lately, to be learned from again and again: rings of transitions on one device.

`Replay`: each of N environments (a line) has a ring of P places of its own; all fields are flat, [P × N, ..], and a
cell is place × N + line, so that the next cell of the same line is (cell + N) mod (P × N). An observation is stored
once. Along a line the cells read

    o₀ a₀ r₀ | o₁ a₁ r₁ ended | o₂ (final) | o₃ a₃ r₃ | o₄ (open)

- a cell *acted* in holds a transition, and the cell after it holds the observation that the step led to: the next one,
  or, where the episode was cut off, its true final observation, in a cell of its own that is never acted in. So after m
  steps of one episode the bootstrap observation lies m cells on, whether it goes on or was cut off. One that terminated
  has such a cell too, but what is in it counts for nothing: nothing follows.
- the cursor's cell is open: its observation is the newest and its action is yet to come. It is written together with
  the step that led to it, so a transition may be sampled as soon as it is added.
- cells are written in order, so an old transition goes before its successor does: each line keeps its newest P
  observations and the transitions among them. Finals and the open cell take a place each.
- `order` is a second ring, of the acted cells of each line as they were added. The transitions held by a line are the
  numbers left ≤ j < entered; a uniform draw among all lines' is exact, without rejections.

Everything but checkpoints may be captured in a CUDA graph: counters are tensors and shapes are static. A
draw from an empty memory is legal (graphs are warmed up before anything was added); such transitions weigh 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from unidle.errors import UsageError


@dataclass(frozen=True)
class Transitions:
    """A batch of B: acted in `obs`, earned `returns`, and what follows is worth discounts × V(next_obs)."""

    obs: Tensor  # [B, obs_bytes] uint8
    actions: Tensor  # [B, width]
    returns: Tensor  # [B] Σ γᵏ r over the m steps that were looked at
    discounts: Tensor  # [B] γᵐ; 0 where the episode terminated
    next_obs: Tensor  # [B, obs_bytes] uint8: m steps later
    index: Tensor  # [B] long: the cell each came from
    weights: Tensor  # [B] of each in the loss

    def tensors(self) -> list[Tensor]:
        """The fields, in order."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def __len__(self) -> int:
        return len(self.returns)

    def __getitem__(self, rows: slice) -> Transitions:
        """A part of the batch."""
        return Transitions(*(tensor[rows] for tensor in self.tensors()))

    @property
    def valid(self) -> Tensor:
        """[B] 1 for a real transition, 0 where there was none to draw."""
        return (self.weights > 0).float()

    def copy_(self, other: Transitions) -> None:
        """Take over another batch's values, in place, without waiting for a copy between devices."""
        for mine, others in zip(self.tensors(), other.tensors()):
            mine.copy_(others, non_blocking=True)


class Replay:
    """N lines of P = capacity // N places. A sample looks `n_steps` ahead, less at the end of what there is.

    Near the cursor fewer than n steps have been made. Such a transition is still sampled, with the m steps there are
    and γᵐ: a correct m-step target, where leaving it out would hide the newest experience for n steps.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        obs_bytes: int,
        width: int,
        device: torch.device,
        gamma: float,
        n_steps: int = 1,
    ) -> None:
        """`obs_bytes` is a multiple of 8, as ObservationLayout makes it; `width` is an action's."""
        places = capacity // n_envs
        if places < n_steps + 2:  # those, a final observation and the open one
            raise UsageError(
                f"A replay of {capacity:,} transitions is too small for {n_envs:,} environments; "
                f"give it a capacity of at least {(n_steps + 2) * n_envs:,}."
            )

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.n_cells, self.n_lines, self._places = places * n_envs, n_envs, places
        self.obs = zeros(self.n_cells, obs_bytes, dtype=torch.uint8)
        self.actions = zeros(self.n_cells, width)
        self.rewards = zeros(self.n_cells)
        self.terminated = zeros(self.n_cells, dtype=torch.bool)
        self.ended = zeros(self.n_cells, dtype=torch.bool)  # terminated or truncated
        self.acted = zeros(self.n_cells, dtype=torch.bool)  # holds a transition
        self.order = zeros(self.n_cells, dtype=torch.int32)  # [j mod P, line] the cell of the line's j-th transition
        self._lines = torch.arange(n_envs, device=device)
        self.cursor = self._lines.clone()  # [N] the open cells
        self.entered = torch.zeros_like(self.cursor)  # [N] transitions that were ever added
        self.left = torch.zeros_like(self.cursor)  # [N] and those of them that were overwritten
        self._ahead = torch.arange(n_steps, device=device) * n_envs  # [n] from a cell to those of the steps from it
        powers = gamma ** torch.arange(n_steps + 1, dtype=torch.float64)
        self.powers = powers.to(device, torch.float32)  # [n + 1] γᵏ

    @staticmethod
    def bytes_per_place(obs_bytes: int, width: int) -> int:
        """What one unit of capacity costs."""
        return obs_bytes + 4 * width + 4 + 3 + 4  # row, action, reward, three flags, order

    @property
    def count(self) -> Tensor:
        """[] how many transitions there are."""
        return (self.entered - self.left).sum()

    @property
    def counters(self) -> list[Tensor]:
        """What a capture that adds must put back after its warm-up.

        Not the fields: the first real call writes the same cells again.
        """
        return [self.cursor, self.entered, self.left, self.acted]

    def start(self, obs: Tensor, lines: Tensor | None = None) -> None:
        """The observations [N, obs_bytes] that environments stand at: in `lines` [N] a new one, else that of last time.

        At first that is all of them. Later, where one was made anew, its episode counts as cut off where it was.
        """
        lines = torch.ones_like(self._lines, dtype=torch.bool) if lines is None else lines
        last = self.after(self.cursor, -1)
        open_ = self.acted[last] & lines  # after an episode's end the last cell is a final one
        self.ended.index_copy_(0, last, self.ended[last] | lines)  # in a final cell it says nothing
        self.cursor.copy_(self.after(self.cursor, open_.long()))  # what was open is now final
        self._claim(self.cursor, obs)

    def add(
        self,
        actions: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        next_obs: Tensor,
        final_obs: Tensor,
    ) -> None:
        """One step of every environment: [N, width], [N], [N], [N], [N, obs_bytes] twice.

        Where an episode ended, `next_obs` are the next one's first and `final_obs` its own last; elsewhere
        `final_obs` may hold anything.
        """
        here, ended = self.cursor, terminated | truncated
        self.actions.index_copy_(0, here, actions)
        self.rewards.index_copy_(0, here, rewards)
        self.terminated.index_copy_(0, here, terminated)
        self.ended.index_copy_(0, here, ended)
        self.acted.index_fill_(0, here, True)
        self.order.index_copy_(0, self._place_in_order(self.entered, self._lines), here.int())
        self.entered.add_(1)
        # Where no episode ended, the final row's cell is the next row's, which is written after it.
        self._claim(self.after(here), final_obs)
        opened = self.after(here, 1 + ended.long())
        self._claim(opened, next_obs)
        self.cursor.copy_(opened)

    def after(self, cells: Tensor, steps: Tensor | int = 1) -> Tensor:
        """The cells so many places on, each in its own line."""
        return (cells + steps * self.n_lines) % self.n_cells

    def _claim(self, cells: Tensor, obs: Tensor) -> None:
        """Put observations into cells, one in each line; the transition that was there has left."""
        self.left.add_(self.acted[cells])
        self.acted.index_fill_(0, cells, False)
        self.obs.index_copy_(0, cells, obs)

    def _place_in_order(self, number: Tensor, line: Tensor) -> Tensor:
        return number % self._places * self.n_lines + line

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, uniformly among all transitions of all lines, with replacement."""
        held = self.entered - self.left  # [N]
        upto = held.cumsum(0)
        pick = integers_below(upto[-1], (batch_size,), generator)
        line = torch.searchsorted(upto, pick, right=True).clamp_(max=self.n_lines - 1)
        number = self.left[line] + pick - (upto - held)[line]
        return self.order[self._place_in_order(number, line)].long()

    def at(self, cells: Tensor) -> Transitions:
        """The transitions that start in these cells [B], n steps long or as long as they are."""
        path = (cells.unsqueeze(1) + self._ahead) % self.n_cells  # [B, n]
        is_open = path == self.cursor[cells % self.n_lines].unsqueeze(1)
        # Step k is made if all before it are, none of them ended the episode, and k's cell is not the open one.
        goes_on = ~(self.ended[path[:, :-1]] | is_open[:, 1:])
        made = torch.cat([torch.ones_like(is_open[:, :1]), goes_on.cumprod(1).bool()], 1)  # [B, n]
        m = made.sum(1)
        rewards = self.rewards[path].masked_fill(~made, 0.0)
        terminated = self.terminated[self.after(cells, m - 1)]
        return Transitions(
            obs=obs_at(self.obs, cells),
            actions=self.actions.index_select(0, cells),
            returns=(rewards * self.powers[:-1]).sum(1),
            discounts=self.powers[m].masked_fill(terminated, 0.0),
            next_obs=obs_at(self.obs, self.after(cells, m)),
            index=cells,
            weights=self.acted[cells].float(),
        )

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """A uniform batch, with replacement."""
        return self.at(self.draw(batch_size, generator))

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        names = "obs actions rewards terminated ended acted order cursor entered left"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put a checkpoint's values into the tensors that are here."""
        restore(self.state_dict(), state)


def restore(tensors: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Put a checkpoint's values into these tensors; UsageError if they are of another memory."""
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:  # copy_ would broadcast one environment to many
            raise UsageError(
                f"The checkpoint's replay has {name} of shape {tuple(state[name].shape)}, this run's has "
                f"{tuple(tensor.shape)}; resume with the capacity, environments and spaces that it was made with."
            )
        tensor.copy_(state[name])


def integers_below(bound: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in 0 ≤ i < bound, a tensor; 0 where bound is. float64: of float32's 2²⁴ values some cells get none."""
    draws = torch.rand(shape, dtype=torch.float64, device=bound.device, generator=generator)
    return torch.minimum((draws * bound).long(), bound - 1).clamp_(min=0)


def obs_at(obs: Tensor, cells: Tensor) -> Tensor:
    """Rows [B, obs_bytes]; gathered by words of 8 bytes, because a gather costs by the element."""
    return obs.view(torch.int64).index_select(0, cells).view(torch.uint8)
