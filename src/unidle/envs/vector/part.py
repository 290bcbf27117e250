"""One vector environment, and the entries of the block that its steps are written to.

`VectorHostEnvs` steps such parts in the trainer's process, `VectorSlots` one of them in a process of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from unidle.envs.adapter_registry import adapter_for
from unidle.envs.check import check_mask, check_observation, layout_check
from unidle.envs.make import EnvMaker
from unidle.envs.pool.slot import episode_seed
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import UNANNOUNCED_MASK, EnvSpec
from unidle.envs.vector.adapters import ObsBatch, VectorAdapter, VectorStep, select_one
from unidle.envs.vector.decode import decode_batch
from unidle.errors import UsageError, wrap_errors
from unidle.spaces.observations import MASK

CHECKED_STEPS = 8  # later steps are not checked in full


def make_vector(maker: EnvMaker, size: int) -> VectorAdapter:
    """A vector environment: of `size` environments if its library creates any number, else as the factory returns."""
    if maker.native is not None:
        vector: VectorAdapter = maker.native(maker, size)
        return vector
    env = maker.single_or_vector()
    try:
        adapter = adapter_for(env)
        assert adapter is not None
        vector = adapter.load()(env, maker.name)
    except UsageError:
        env.close()
        raise
    return vector


class VectorPart:
    """A vector environment whose environments are entries `first` to `end` of a block."""

    def __init__(
        self,
        vector: VectorAdapter,
        env_spec: EnvSpec,
        block: SharedBlock,
        first: int,
        seed: int,
        first_index: int,
        checked_steps: int = CHECKED_STEPS,
    ) -> None:
        """Entry 0 of the block is environment `first_index` of the run; `checked_steps` steps are checked in full."""
        self.vector, self._env_spec, self._block = vector, env_spec, block
        self._first, self._end = first, first + vector.size
        self._seed, self._first_index = seed, first_index
        self._check_layout = layout_check(env_spec.obs_layout)
        # Annotated for one env id; an array of ids or a slice works too.
        self._write_obs: Any = env_spec.obs_layout.writer(block.obs)
        self._write_final = env_spec.obs_layout.writer(block.final_obs)
        self._masks = env_spec.obs_layout.mask_view(block.obs) if env_spec.obs_layout.mask_width else None
        self._returns, self._lengths = np.zeros(vector.size), np.zeros(vector.size, np.int64)  # of open episodes
        self._unchecked, self._steps = checked_steps, 0

    def start(self, episodes: np.ndarray) -> None:
        """Reset all environments and number their episodes [size] as given."""
        self._returns[:], self._lengths[:] = 0.0, 0
        self._block.episode[self._first : self._end] = episodes
        numbered = enumerate(episodes.tolist(), self._first_index + self._first)
        seeds = [episode_seed(self._seed, env, episode) for env, episode in numbered]
        with wrap_errors("The vector environment failed in reset()"):
            obs = self.vector.reset(seeds)
            self._check(obs, "reset")
            self._write(obs)

    def send(self) -> None:
        """Start a step with the actions in the block."""
        actions = decode_batch(self._env_spec.action_layout, self._block.actions[self._first : self._end])
        with self._wrap_errors():
            self.vector.send(actions)

    def recv(self) -> None:
        """Finish the step and write its results to the block."""
        with self._wrap_errors():
            self._store(self.vector.recv())

    def _wrap_errors(self) -> contextlib.AbstractContextManager[None]:
        return wrap_errors(f"The vector environment failed in step {self._steps}")

    def _store(self, step: VectorStep) -> None:
        block, first, end = self._block, self._first, self._end
        self._steps += 1
        if self._unchecked:
            self._unchecked -= 1
            self._check_step(step)
        # Termination wins over truncation: there is nothing to bootstrap from.
        terminated, truncated = step.terminated, step.truncated & ~step.terminated
        ended = terminated | truncated
        block.reward[first:end] = step.rewards
        block.terminated[first:end], block.truncated[first:end] = terminated, truncated
        self._returns += step.rewards if step.scores is None else step.scores
        self._lengths += 1
        if ended.any():
            for index in np.flatnonzero(truncated).tolist():
                self._write_final(first + index, step.final_obs(index))
            at, found = first + np.flatnonzero(ended), np.flatnonzero(ended)
            block.episode_return[at], block.episode_length[at] = self._returns[found], self._lengths[found]
            block.episode[at] += 1
            self._returns[found], self._lengths[found] = 0.0, 0
        # The mask of a final observation is not needed if the first observation follows separately.
        self._write(step.obs, maskless=ended if step.reset_obs else None)
        if step.reset_obs:
            self._write(step.reset_obs)

    def _write(self, obs: ObsBatch, maskless: np.ndarray | None = None) -> None:
        at = self._first + obs.env_ids
        self._check_layout(obs.observations, (len(at),))
        self._write_obs(at, obs.observations)
        if self._masks is None:
            return
        in_observation = self._env_spec.obs_layout.mask_key is not None
        for index, env_id in enumerate(at.tolist()):
            if maskless is None or not maskless[index]:
                mask = obs.observations[MASK][index] if in_observation else obs.mask_of(index)
                self._masks[env_id] = check_mask(self._env_spec.action_layout, mask)

    # -- checking the first steps --------------------------------------------------------------------------------------

    def _check_step(self, step: VectorStep) -> None:
        for name, what, kinds in (
            ("rewards", "number", "fiu"),
            ("terminated", "bool", "b"),
            ("truncated", "bool", "b"),
        ):
            given = np.asarray(getattr(step, name))
            if given.shape != (self.vector.size,) or given.dtype.kind not in kinds:
                raise UsageError(
                    f"step() of the vector environment must return {name} as one {what} per "
                    f"environment ({self.vector.size}), not {given.dtype} of shape {given.shape}."
                )
        self._check(step.obs, "step", np.asarray(step.rewards))
        if step.reset_obs:
            self._check(step.reset_obs, "reset")

    def _check(self, obs: ObsBatch, method: str, rewards: np.ndarray | None = None) -> None:
        space = self.vector.observation_space
        for index in range(len(obs.env_ids)):
            observation = select_one(space, obs.observations, index)
            check_observation(space, observation, method, 0.0 if rewards is None else rewards[index])
        may_have_masks = self._env_spec.action_layout.mask_width and not self._env_spec.ignores_masks
        if self._masks is None and may_have_masks and obs.mask_of(0) is not None:
            raise UsageError(UNANNOUNCED_MASK)
