"""Batched environments on the policy's device: a step is a pure function of tensors for all of them.

A step must not synchronise with the host, so that a whole rollout can be captured as a CUDA graph. Random numbers are a
hash of (seed, environment, episode, draw), so each environment has its own and a captured rollout is reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from gymnasium import spaces
from torch import Tensor

from unidle.rng import HASH_DRAW, HASH_EPISODE, HASH_FACTORS

State = dict[str, Tensor]  # each [N, ..]; everything that the next step depends on
_32_BITS = 0xFFFFFFFF


class Step(NamedTuple):
    """The result of a step. Where an episode ended, `observation` is the first one of the next episode."""

    observation: Tensor  # [N, *shape]
    final_observation: Tensor  # [N, *shape] before the reset
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool; False where the episode also terminated


@dataclass(frozen=True)
class Traits:
    """What a device environment guarantees; an environment without an attribute `traits` guarantees all of it."""

    capture_safe: bool = True  # a step uses only torch, on fixed tensors, so a CUDA graph can replay it
    resumable: bool = True  # the returned state is complete, so a checkpoint can restore it
    exact_final_observation: bool = True  # else the final observation of a truncated episode is the one before it


def traits_of(env: Any) -> Traits:
    """The traits of `env`; they may still change until an episode has ended (see IsaacEnv)."""
    traits: Traits = getattr(env, "traits", Traits())
    return traits


class DeviceEnv(Protocol):
    """N environments on one device."""

    n_envs: int
    observation_space: spaces.Space  # of one of them
    action_space: spaces.Space
    episode_limit: int | None  # steps after which an episode is truncated; None: never

    def begin(self) -> tuple[State, Tensor]:
        """Return the state and observation at the start of episode 0 of every environment."""

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, width]: categories as indices, continuous actions within their bounds."""


@runtime_checkable
class MaskedDeviceEnv(DeviceEnv, Protocol):
    """A DeviceEnv with action masks."""

    def mask(self, state: State) -> Tensor:
        """[N, Σ categories] uint8, concatenated over action heads: 1 for each category that this state allows."""


@runtime_checkable
class LoggingDeviceEnv(DeviceEnv, Protocol):
    """A DeviceEnv that logs values with its steps."""

    logged: Mapping[str, Any]  # by the latest step: numbers and tensors


def uniform(seed: int, env: Tensor, episode: Tensor, draws: int) -> Tensor:
    """Uniform numbers in [0, 1), [N, draws] float32, that depend only on seed, environment [N] and episode [N]."""
    word = _hash_32(env + hash_seed(seed))
    word = _hash_32(word ^ _hash_32(episode + HASH_EPISODE))
    draw = torch.arange(1, draws + 1, device=env.device) * HASH_DRAW
    word = _hash_32(word.unsqueeze(-1) + draw)
    return (word >> 8).to(torch.float32) * 2.0**-24


def _hash_32(word: Tensor) -> Tensor:
    """C. Wellons' low-bias 32-bit hash, computed in int64 with the upper bits masked off.

    Its factors are below 2^31, so no product overflows and torch.compile accepts them.
    """
    word = word & _32_BITS
    word = ((word ^ (word >> 16)) * HASH_FACTORS[0]) & _32_BITS
    word = ((word ^ (word >> 15)) * HASH_FACTORS[1]) & _32_BITS
    return word ^ (word >> 15)


def hash_seed(seed: int) -> int:
    """Hash a 64-bit seed to 32 bits."""
    seed = (seed ^ (seed >> 32)) * 0x9E3779B97F4A7C15
    return (seed >> 16) & _32_BITS
