"""The replay buffer: the newest transitions of N environments, as rings on one device.

Each environment has a ring of P places. All fields are flat, [P × N, ..]; a cell is place × N + env, so the next cell
of the same environment is (cell + N) mod (P × N). Each observation is stored once. Along a ring the cells read

    o₀ a₀ r₀ | o₁ a₁ r₁ ended | o₂ (final) | o₃ a₃ r₃ | o₄ (open)

- An *acted* cell holds a transition; the next cell holds its next observation. Where the episode was truncated that is
  its true final observation, in a separate cell without an action. So the bootstrap observation of m steps of
  one episode is m cells ahead, whether the episode continues or was truncated. A terminated episode has such a cell
  too, but its content is never used.
- The cursor's cell is open: it holds the newest observation, whose action is not known yet. It is written together with
  the step that led to it, so a transition can be sampled as soon as it is added.
- Cells are written in order, so each environment keeps its newest P observations and the transitions among them. Final
  observations and the open cell take one place each.
- `order` is a second ring: the acted cells of each environment in the order they were added. The stored transitions are
  the numbers left ≤ j < entered, so a uniform draw over all environments is exact, without rejection.

Everything except checkpoints can be captured in a CUDA graph: counters are tensors and shapes are static. Sampling an
empty buffer is legal (graphs are warmed up before anything is added); such transitions have weight 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from unidle.errors import UsageError


@dataclass(frozen=True)
class Transitions:
    """A batch of m-step transitions, m ≤ n; the target of Q(obs, actions) is returns + discounts × V(next_obs)."""

    obs: Tensor  # [B, obs_bytes] uint8
    actions: Tensor  # [B, width]
    returns: Tensor  # [B] Σ γᵏ rₖ over m steps
    discounts: Tensor  # [B] γᵐ; 0 where the episode terminated
    next_obs: Tensor  # [B, obs_bytes] uint8, m steps later
    index: Tensor  # [B] long: cells
    weights: Tensor  # [B] in the loss; 0: not a real transition

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
        """Copy another batch in place, asynchronously between devices."""
        for mine, others in zip(self.tensors(), other.tensors()):
            mine.copy_(others, non_blocking=True)


class Replay:
    """N rings of P = capacity // N places; samples are n-step transitions, n being `n_steps`.

    Near the cursor only m < n steps exist. Such a transition is sampled as an m-step one, with γᵐ: its target is
    correct, and leaving it out would delay the newest experience by n steps.
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
        if places < n_steps + 2:  # the steps, a final observation and the open one
            raise UsageError(
                f"A replay buffer of {capacity:,} transitions is too small for {n_envs:,} environments; "
                f"set --buffer-size to at least {(n_steps + 2) * n_envs:,}."
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
        self.order = zeros(self.n_cells, dtype=torch.int32)  # [j mod P, env] cell of the environment's j-th transition
        self._lines = torch.arange(n_envs, device=device)
        self.cursor = self._lines.clone()  # [N] the open cells
        self.entered = torch.zeros_like(self.cursor)  # [N] transitions added so far
        self.left = torch.zeros_like(self.cursor)  # [N] transitions overwritten so far
        self._ahead = torch.arange(n_steps, device=device) * n_envs  # [n] offsets of the next n steps
        powers = gamma ** torch.arange(n_steps + 1, dtype=torch.float64)
        self.powers = powers.to(device, torch.float32)  # [n + 1] γᵏ

    @staticmethod
    def bytes_per_place(obs_bytes: int, width: int) -> int:
        """Bytes per unit of capacity."""
        return obs_bytes + 4 * width + 4 + 3 + 4  # observation, action, reward, three flags, order

    @property
    def count(self) -> Tensor:
        """[] number of stored transitions."""
        return (self.entered - self.left).sum()

    @property
    def counters(self) -> list[Tensor]:
        """Tensors to restore after the warm-up of a captured `add`.

        Not the fields: the first real call overwrites the same cells.
        """
        return [self.cursor, self.entered, self.left, self.acted]

    def start(self, obs: Tensor, lines: Tensor | None = None) -> None:
        """Set the current observations [N, obs_bytes]; `lines` [N] marks environments that were (re)started.

        At first that is all of them. Later, the open episode of a restarted environment is truncated where it was.
        """
        lines = torch.ones_like(self._lines, dtype=torch.bool) if lines is None else lines
        last = self.after(self.cursor, -1)
        open_ = self.acted[last] & lines  # after an episode's end the last cell is its final one
        self.ended.index_copy_(0, last, self.ended[last] | lines)  # meaningless in a final cell
        self.cursor.copy_(self.after(self.cursor, open_.long()))  # the open cell becomes the final one
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
        """Add one step of every environment: [N, width], [N], [N], [N], [N, obs_bytes] twice.

        Where an episode ended, `next_obs` is the first of the next one and `final_obs` its own last; elsewhere
        `final_obs` is ignored.
        """
        here, ended = self.cursor, terminated | truncated
        self.actions.index_copy_(0, here, actions)
        self.rewards.index_copy_(0, here, rewards)
        self.terminated.index_copy_(0, here, terminated)
        self.ended.index_copy_(0, here, ended)
        self.acted.index_fill_(0, here, True)
        self.order.index_copy_(0, self._place_in_order(self.entered, self._lines), here.int())
        self.entered.add_(1)
        # Where no episode ended, both are the same cell, and the next observation is written last.
        self._claim(self.after(here), final_obs)
        opened = self.after(here, 1 + ended.long())
        self._claim(opened, next_obs)
        self.cursor.copy_(opened)

    def after(self, cells: Tensor, steps: Tensor | int = 1) -> Tensor:
        """The cells `steps` places ahead in the same rings."""
        return (cells + steps * self.n_lines) % self.n_cells

    def _claim(self, cells: Tensor, obs: Tensor) -> None:
        """Write observations to cells, one per environment, overwriting the transitions that were there."""
        self.left.add_(self.acted[cells])
        self.acted.index_fill_(0, cells, False)
        self.obs.index_copy_(0, cells, obs)

    def _place_in_order(self, number: Tensor, line: Tensor) -> Tensor:
        return number % self._places * self.n_lines + line

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, uniform among all transitions, with replacement."""
        held = self.entered - self.left  # [N]
        upto = held.cumsum(0)
        pick = integers_below(upto[-1], (batch_size,), generator)
        line = torch.searchsorted(upto, pick, right=True).clamp_(max=self.n_lines - 1)
        number = self.left[line] + pick - (upto - held)[line]
        return self.order[self._place_in_order(number, line)].long()

    def at(self, cells: Tensor) -> Transitions:
        """The n-step transitions from these cells [B], shorter where fewer steps exist."""
        path = (cells.unsqueeze(1) + self._ahead) % self.n_cells  # [B, n]
        is_open = path == self.cursor[cells % self.n_lines].unsqueeze(1)
        # Step k exists if all before it do, none of them ended the episode, and its cell is not the open one.
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
        """All fields and counters."""
        names = "obs actions rewards terminated ended acted order cursor entered left"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        restore(self.state_dict(), state)


def restore(tensors: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Copy a checkpoint's values into these tensors; UsageError if the shapes differ."""
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:  # copy_ would broadcast one environment to many
            raise UsageError(
                f"The checkpoint's replay buffer has {name} of shape {tuple(state[name].shape)}, this run's has "
                f"{tuple(tensor.shape)}; resume with the same --buffer-size, --n-envs and environment."
            )
        tensor.copy_(state[name])


def integers_below(bound: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform integers 0 ≤ i < bound; 0 if bound is 0. In float64: float32 has too few values to reach every cell."""
    draws = torch.rand(shape, dtype=torch.float64, device=bound.device, generator=generator)
    return torch.minimum((draws * bound).long(), bound - 1).clamp_(min=0)


def obs_at(obs: Tensor, cells: Tensor) -> Tensor:
    """Observations [B, obs_bytes], gathered as 8-byte words: a gather costs per element."""
    return obs.view(torch.int64).index_select(0, cells).view(torch.uint8)
