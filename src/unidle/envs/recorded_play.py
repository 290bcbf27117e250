"""Plays random steps for `unidle check-env`, checks what is returned, and records it as hashes and extremes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.check import check_mask, check_observation, check_return_value
from unidle.envs.spec import EnvSpec, mask_from, random_action
from unidle.envs.surviving_state import plain_attributes
from unidle.envs.vector.host_envs import VectorHostEnvs, write_random_actions
from unidle.spaces.observations import ObservationLayout
from unidle.spaces.tree import describe_path


@dataclass
class Record:
    """A record of some steps, whose size does not depend on the size of observations."""

    hashes: list[bytes] = field(default_factory=list)  # of the first observation, and of those of each step
    rewards: list[tuple[float, ...]] = field(default_factory=list)  # of each step: one per environment
    episodes: int = 0  # that ended
    widest: dict[str, float] = field(default_factory=dict)  # largest absolute value of each part of the observation
    attributes: dict[str, Any] = field(default_factory=dict)  # see `plain_attributes`, after the first reset

    def add_observation(self, layout: ObservationLayout, obs: np.ndarray) -> None:
        """Add packed observations [n, obs_bytes]."""
        self.hashes.append(hashlib.blake2b(obs.tobytes(), digest_size=16).digest())
        records = obs.view(layout.dtype)
        for index, leaf in enumerate(layout.leaves):
            if isinstance(leaf.space, spaces.Box) and not leaf.is_image:
                name = describe_path("observation", leaf.path)
                found = np.abs(records[str(index)].astype(np.float64)).max(initial=self.widest.get(name, 0.0))
                self.widest[name] = float(found)

    def difference(self, other: Record) -> str | None:
        """The first difference to another record of the same actions, up to the end of the shorter one."""
        for step, (mine, its) in enumerate(zip(self.hashes, other.hashes)):
            if mine != its:
                return f"the observation after step {step}" if step else "the first observation"
            if step < min(len(self.rewards), len(other.rewards)) and self.rewards[step] != other.rewards[step]:
                before, now = next(pair for pair in zip(self.rewards[step], other.rewards[step]) if pair[0] != pair[1])
                return f"the reward of step {step + 1} was {before!r}, then {now!r}"
        return None


def play(env: gymnasium.Env, env_spec: EnvSpec, steps: int, seed: int, on_step: Callable[[int], None]) -> Record:
    """Take and check `steps` random steps; `on_step` is called with the number of steps each time."""
    layout, actions, rng, record = env_spec.obs_layout, env_spec.action_layout, np.random.default_rng(seed), Record()
    observation, info = check_return_value(env.reset(seed=seed), 2, "reset")
    record.attributes = plain_attributes(env)
    record.add_observation(layout, layout.pack(observation)[np.newaxis])
    for step in range(steps):
        mask = check_mask(actions, mask_from(observation, info, layout.space)) if layout.mask_width else None
        outcome = check_return_value(env.step(random_action(actions, rng, mask)), 5, "step")
        observation, reward, terminated, truncated, info = outcome
        check_observation(env.observation_space, observation, "step", reward)
        record.rewards.append((float(reward),))
        seen = [layout.pack(observation)]
        if terminated or truncated:
            record.episodes += 1
            observation, info = check_return_value(env.reset(seed=seed + step + 1), 2, "reset")
            check_observation(env.observation_space, observation, "reset")
            seen.append(layout.pack(observation))
        record.add_observation(layout, np.stack(seen))
        on_step(1)
    return record


def play_vector(envs: VectorHostEnvs, steps: int, seed: int, on_step: Callable[[int], None]) -> Record:
    """`play` for vector environments: at least `steps` environment steps in total."""
    layout, block, rng, record = envs.env_spec.obs_layout, envs.block, np.random.default_rng(seed), Record()
    envs.start(np.zeros(envs.n_envs, np.int64))
    record.add_observation(layout, block.obs)
    for _ in range(-(-steps // envs.n_envs)):
        write_random_actions(envs, rng)
        envs.send([0])
        envs.recv(1)
        record.rewards.append(tuple(block.reward.tolist()))
        record.episodes += int((block.terminated | block.truncated).sum())
        record.add_observation(layout, block.obs)
        on_step(envs.n_envs)
    return record
