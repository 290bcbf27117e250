"""The replay buffer: the newest transitions of N environments, as rings on one device.

Each environment has a ring of P positions. All fields are flat, [P × N, ..]; a cell is position × N + env, so the next
cell of the same environment is (cell + N) mod (P × N). Each observation is stored once. A ring holds, for example,

    o₀ a₀ r₀ | o₁ a₁ r₁ ended | o₂ (final) | o₃ a₃ r₃ | o₄ (open)

- Where `has_transition` is set, a cell holds a transition, and the next cell holds its next observation. If the episode
  was truncated, that is its true final observation, in a separate cell without an action. So the bootstrap observation
  of m steps of one episode is m cells ahead, whether the episode continues or was truncated. A terminated episode has
  such a cell too, but its content is never used.
- The cursor's cell is open: it holds the newest observation, whose action is not known yet. It is written together with
  the step that led to it, so a transition can be sampled as soon as it is added.
- Cells are written in order, so each environment keeps its newest P observations and the transitions among them. Final
  observations and the open cell take one cell each.
- `order` is a second ring: the cells of each environment's transitions, in the order they were added. The stored
  transitions are numbers n_overwritten ≤ j < n_added, so uniform sampling over all environments is exact, without
  rejection.

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
    """A batch of m-step transitions (m ≤ n); the target of Q(obs, actions) is returns + discounts × V(next_obs)."""

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
        """[B] 1 for a real transition, 0 where the buffer was empty."""
        return (self.weights > 0).float()

    def copy_(self, other: Transitions) -> None:
        """Copy another batch in place, asynchronously between devices."""
        for tensor, source in zip(self.tensors(), other.tensors()):
            tensor.copy_(source, non_blocking=True)


class Replay:
    """N rings of P = capacity // N cells; samples are n-step transitions with n = `n_steps`.

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
        """`obs_bytes` is a multiple of 8, as in `ObservationLayout`; `width` is the width of a flat action."""
        self._require_capacity(capacity, n_envs, n_steps)
        ring_size = capacity // n_envs

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.n_cells, self.n_envs, self._ring_size = ring_size * n_envs, n_envs, ring_size
        self.obs = zeros(self.n_cells, obs_bytes, dtype=torch.uint8)
        self.actions = zeros(self.n_cells, width)
        self.rewards = zeros(self.n_cells)
        self.terminated = zeros(self.n_cells, dtype=torch.bool)
        self.ended = zeros(self.n_cells, dtype=torch.bool)  # terminated or truncated
        self.has_transition = zeros(self.n_cells, dtype=torch.bool)
        self.order = zeros(self.n_cells, dtype=torch.int32)  # [j mod P, env] cell of the environment's j-th transition
        self._env_ids = torch.arange(n_envs, device=device)
        self.cursor = self._env_ids.clone()  # [N] the open cells
        self.n_added = torch.zeros_like(self.cursor)  # [N] transitions so far
        self.n_overwritten = torch.zeros_like(self.cursor)  # [N] transitions so far
        self._step_offsets = torch.arange(n_steps, device=device) * n_envs  # [n] from a cell to those of the next steps
        powers = gamma ** torch.arange(n_steps + 1, dtype=torch.float64)
        self.powers = powers.to(device, torch.float32)  # [n + 1] γᵏ

    @staticmethod
    def _require_capacity(capacity: int, n_envs: int, n_steps: int) -> None:
        if capacity // n_envs < n_steps + 2:  # the steps, a final observation and the open one
            raise UsageError(
                f"A replay buffer of {capacity:,} transitions is too small for {n_envs:,} environments; "
                f"set --buffer-size to at least {(n_steps + 2) * n_envs:,}."
            )

    @staticmethod
    def bytes_per_transition(obs_bytes: int, width: int) -> int:
        """Bytes per unit of capacity."""
        return obs_bytes + 4 * width + 4 + 3 + 4  # observation, action, reward, three flags, order

    @property
    def count(self) -> Tensor:
        """[] number of stored transitions."""
        return (self.n_added - self.n_overwritten).sum()

    @property
    def counters(self) -> list[Tensor]:
        """Tensors to restore after the warm-up of a captured `add`.

        Not the fields: the first real call overwrites the same cells.
        """
        return [self.cursor, self.n_added, self.n_overwritten, self.has_transition]

    def start(self, obs: Tensor, restarted: Tensor | None = None) -> None:
        """Set the current observations [N, obs_bytes]; `restarted` [N] marks environments that were (re)started.

        By default that is all of them, as at first. The open episode of a restarted environment is truncated.
        """
        restarted = torch.ones_like(self._env_ids, dtype=torch.bool) if restarted is None else restarted
        last = self.after(self.cursor, -1)
        open_ = self.has_transition[last] & restarted  # after an episode's end the last cell is its final one
        self.ended.index_copy_(0, last, self.ended[last] | restarted)  # meaningless in a final cell
        self.cursor.copy_(self.after(self.cursor, open_.long()))  # the open cell becomes the final one
        self._write_obs(self.cursor, obs)

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

        Where an episode ended, `final_obs` is its last observation and `next_obs` the first of the next episode;
        elsewhere `final_obs` is ignored.
        """
        here, ended = self.cursor, terminated | truncated
        self.actions.index_copy_(0, here, actions)
        self.rewards.index_copy_(0, here, rewards)
        self.terminated.index_copy_(0, here, terminated)
        self.ended.index_copy_(0, here, ended)
        self.has_transition.index_fill_(0, here, True)
        self.order.index_copy_(0, self._order_index(self.n_added, self._env_ids), here.int())
        self.n_added.add_(1)
        # Where no episode ended, both are written to the same cell, `next_obs` last.
        self._write_obs(self.after(here), final_obs)
        opened = self.after(here, 1 + ended.long())
        self._write_obs(opened, next_obs)
        self.cursor.copy_(opened)

    def after(self, cells: Tensor, steps: Tensor | int = 1) -> Tensor:
        """The cells `steps` ahead in the same rings."""
        return (cells + steps * self.n_envs) % self.n_cells

    def lost(self, cells: Tensor) -> Tensor:
        """The cells whose transitions can no longer be sampled once these are overwritten."""
        return cells

    def _write_obs(self, cells: Tensor, obs: Tensor) -> None:
        """Write observations to cells, one per environment, overwriting the oldest transitions."""
        lost = self.lost(cells)
        self.n_overwritten.add_(self.has_transition[lost])
        self.has_transition.index_fill_(0, lost, False)
        self.obs.index_copy_(0, cells, obs)

    def _obs_at(self, cells: Tensor) -> Tensor:
        """Observations [B, obs_bytes]."""
        return gather_obs(self.obs, cells)

    def _order_index(self, number: Tensor, env: Tensor) -> Tensor:
        return number % self._ring_size * self.n_envs + env

    def sample_cells(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, uniform among all transitions, with replacement."""
        n_stored = self.n_added - self.n_overwritten  # [N]
        cumulative = n_stored.cumsum(0)
        pick = uniform_integers(cumulative[-1], (batch_size,), generator)
        env = torch.searchsorted(cumulative, pick, right=True).clamp_(max=self.n_envs - 1)
        number = self.n_overwritten[env] + pick - (cumulative - n_stored)[env]
        return self.order[self._order_index(number, env)].long()

    def gather(self, cells: Tensor) -> Transitions:
        """The n-step transitions from these cells [B], shorter where fewer steps exist."""
        path = (cells.unsqueeze(1) + self._step_offsets) % self.n_cells  # [B, n]
        is_open = path == self.cursor[cells % self.n_envs].unsqueeze(1)
        # Step k exists if all earlier steps do, none of them ended the episode, and its cell is not the open one.
        continues = ~(self.ended[path[:, :-1]] | is_open[:, 1:])
        exists = torch.cat([torch.ones_like(is_open[:, :1]), continues.cumprod(1).bool()], 1)  # [B, n]
        length = exists.sum(1)
        rewards = self.rewards[path].masked_fill(~exists, 0.0)
        terminated = self.terminated[self.after(cells, length - 1)]
        return Transitions(
            obs=self._obs_at(cells),
            actions=self.actions.index_select(0, cells),
            returns=(rewards * self.powers[:-1]).sum(1),
            discounts=self.powers[length].masked_fill(terminated, 0.0),
            next_obs=self._obs_at(self.after(cells, length)),
            index=cells,
            weights=self.has_transition[cells].float(),
        )

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """A uniform batch, with replacement."""
        return self.gather(self.sample_cells(batch_size, generator))

    def state_dict(self) -> dict[str, Tensor]:
        """All fields and counters; some have other names than in the code, for checkpoints of earlier versions."""
        names = "obs actions rewards terminated ended order cursor"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "acted": self.has_transition,
            "entered": self.n_added,
            "left": self.n_overwritten,
        }

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


def uniform_integers(bound: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform integers 0 ≤ i < bound; 0 if bound is 0. In float64: float32 has too few values to hit every cell."""
    draws = torch.rand(shape, dtype=torch.float64, device=bound.device, generator=generator)
    return torch.minimum((draws * bound).long(), bound - 1).clamp_(min=0)


def gather_obs(obs: Tensor, cells: Tensor) -> Tensor:
    """obs[cells], [B, .., obs_bytes], gathered as 8-byte words: the cost of a gather is per element."""
    return obs.view(torch.int64).index_select(0, cells).view(torch.uint8)
