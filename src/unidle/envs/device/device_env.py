"""Environments that live where the policy does: a step is a pure function of tensors, for all of them at once.

Nothing in a step may ask the host for a value, so that a whole rollout can be captured and replayed. Random numbers are
a hash of (seed, environment, episode, draw): each environment has its own, and a captured rollout repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from gymnasium import spaces
from torch import Tensor

State = dict[str, Tensor]  # each [N, ..]; all that the next step depends on
_32_BITS = 0xFFFFFFFF
FACTORS, EPISODE, DRAW = (0x21F0AAAD, 0x735A2D97), 0x1E3779B9, 0x05EBCA6B  # odd, and all different


class Step(NamedTuple):
    """What came out of a step. Where an episode ended, `observation` already begins the next one."""

    observation: Tensor  # [N, *shape]
    final_observation: Tensor  # [N, *shape] as it was before any reset
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool; never where it also terminated


@dataclass(frozen=True)
class Traits:
    """What an environment on the device can promise; one that has no `traits` promises all of it."""

    capture_safe: bool = True  # a step is work of torch alone, on tensors that stay, so a CUDA graph can replay it
    resumable: bool = True  # its state is all in the tensors that it returns, so it goes on where a checkpoint was
    exact_final_observation: bool = True  # else, of an episode cut off, the observation before the last stands in


def traits_of(env: Any) -> Traits:
    """What `env` promises, as it knows by now."""
    traits: Traits = getattr(env, "traits", Traits())
    return traits


class DeviceEnv(Protocol):
    """N environments on one device."""

    n_envs: int
    observation_space: spaces.Space  # of one of them
    action_space: spaces.Space
    episode_limit: int | None  # steps after which an episode is truncated; None: never

    def begin(self) -> tuple[State, Tensor]:
        """The state in which every environment begins its episode 0, and what it then sees."""

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """One step on flat actions [N, width]: categories as numbers, reals within their range."""


@runtime_checkable
class MaskedDeviceEnv(DeviceEnv, Protocol):
    """One that says which actions are allowed."""

    def mask(self, state: State) -> Tensor:
        """[N, Σ categories] uint8, all heads one after the other: 1 where a category may be chosen in this state."""


def uniform(seed: int, env: Tensor, episode: Tensor, draws: int) -> Tensor:
    """Numbers in [0, 1) [N, draws] float32 that depend on seed, environment [N] and episode [N] alone."""
    word = _mixed(env + scrambled(seed))
    word = _mixed(word ^ _mixed(episode + EPISODE))
    draw = torch.arange(1, draws + 1, device=env.device) * DRAW
    word = _mixed(word.unsqueeze(-1) + draw)
    return (word >> 8).to(torch.float32) * 2.0**-24


def _mixed(word: Tensor) -> Tensor:
    """A hash of 32 bits (found by C. Wellons' search for the least biased), in int64 that keeps only those bits.

    Its factors are below 2^31, so that no product wraps, and torch's compiler takes them.
    """
    word = word & _32_BITS
    word = ((word ^ (word >> 16)) * FACTORS[0]) & _32_BITS
    word = ((word ^ (word >> 15)) * FACTORS[1]) & _32_BITS
    return word ^ (word >> 15)


def scrambled(seed: int) -> int:
    """All bits of a seed in 32."""
    seed = (seed ^ (seed >> 32)) * 0x9E3779B97F4A7C15
    return (seed >> 16) & _32_BITS
