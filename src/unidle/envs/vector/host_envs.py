"""Vector environments of other libraries as HostEnvs.

Their episodes cannot be seeded one by one and their state cannot be restored: a resumed run starts new episodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.envs.adapter_registry import adapter_for
from unidle.envs.check import check_mask, check_observation, layout_check
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slot import episode_seed
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import UNANNOUNCED_MASK, EnvSpec, mask_from, random_flat_action
from unidle.envs.step_times import StepTimes
from unidle.envs.vector.adapters import EnvPoolVector, ObsBatch, VectorAdapter, VectorStep, select_one
from unidle.envs.vector.vector_wrappers import Statistics
from unidle.errors import UsageError, wrap_errors
from unidle.spaces.actions import ActionLayout, Part
from unidle.spaces.observations import MASK, ObservationLayout
from unidle.spaces.tree import rebuild

_CHECKED_STEPS = 8  # later steps are not checked in full


class VectorHostEnvs:
    """Vector environments on one block; each is a slice."""

    workers = 0

    def __init__(
        self,
        vectors: Sequence[VectorAdapter],
        env_spec: EnvSpec,
        seed: int,
        first_index: int = 0,
        checked_steps: int = _CHECKED_STEPS,
    ) -> None:
        """Every environment's first `checked_steps` steps are checked in full."""
        self.env_spec, self._vectors = env_spec, vectors
        ends = np.cumsum([vector.size for vector in vectors]).tolist()
        self.bounds, self.n_envs = list(zip([0, *ends[:-1]], ends)), ends[-1]
        self.block = SharedBlock(env_spec, self.n_envs)
        self.faults: list[Fault] = []  # always empty: unidle cannot restart these
        self.restarted: list[int] = []
        self._seed, self._first_index = seed, first_index
        self._check_layout = layout_check(env_spec.obs_layout)
        # Annotated for one env id; an array of ids or a slice works too.
        self._write_obs: Any = env_spec.obs_layout.writer(self.block.obs)
        self._write_final = env_spec.obs_layout.writer(self.block.final_obs)
        self._masks = env_spec.obs_layout.mask_view(self.block.obs) if env_spec.obs_layout.mask_width else None
        self._returns, self._lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, np.int64)  # of open episodes
        self._unchecked = [checked_steps] * len(vectors)
        self._in_flight: list[int] = []  # slices, the oldest first
        self._steps = 0

    def start(self, episodes: np.ndarray) -> None:
        """Reset all environments and number their episodes as given."""
        self._returns[:], self._lengths[:], self._in_flight = 0.0, 0, []
        self.block.episode[:] = episodes
        for vector, (first, end) in zip(self._vectors, self.bounds):
            numbered = zip(range(first, end), episodes[first:end].tolist())
            seeds = [episode_seed(self._seed, self._first_index + env_id, episode) for env_id, episode in numbered]
            with wrap_errors("The vector environment failed in reset()"):
                obs = vector.reset(seeds)
                self._check(vector, obs, "reset")
                self._write(obs, first)

    def send(self, slices: Sequence[int]) -> None:
        """Step these slices with the actions in the block."""
        for number in slices:
            actions = decode_batch(self.env_spec.action_layout, self.block.actions[slice(*self.bounds[number])])
            with self._wrap_errors():
                self._vectors[number].send(actions)
            self._in_flight.append(number)

    def has_finished(self, at_least: int) -> bool:
        """True: a vector environment cannot be polled."""
        return True

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Wait for the slices that were sent first.

        A vector environment cannot be polled, so `seconds` has no effect.
        """
        done: list[int] = []
        while self._in_flight and len(done) < max(1, at_least):
            done.append(self._in_flight.pop(0))
            with self._wrap_errors():
                self._store(done[-1], self._vectors[done[-1]].recv())
        return sorted(done)

    def _wrap_errors(self) -> contextlib.AbstractContextManager[None]:
        return wrap_errors(f"The vector environment failed in step {self._steps}")

    def _store(self, number: int, step: VectorStep) -> None:
        block, (first, end) = self.block, self.bounds[number]
        self._steps += 1
        if self._unchecked[number]:
            self._unchecked[number] -= 1
            self._check_step(self._vectors[number], step)
        # Termination wins over truncation: there is nothing to bootstrap from.
        terminated, truncated = step.terminated, step.truncated & ~step.terminated
        ended = terminated | truncated
        block.reward[first:end] = step.rewards
        block.terminated[first:end], block.truncated[first:end] = terminated, truncated
        self._returns[first:end] += step.rewards
        self._lengths[first:end] += 1
        if ended.any():
            for env_id in np.flatnonzero(truncated).tolist():
                self._write_final(first + env_id, step.final_obs(env_id))
            at = first + np.flatnonzero(ended)
            block.episode_return[at], block.episode_length[at] = self._returns[at], self._lengths[at]
            block.episode[at] += 1
            self._returns[at], self._lengths[at] = 0.0, 0
        # The mask of a final observation is not needed if the first observation follows separately.
        self._write(step.obs, first, maskless=ended if step.reset_obs else None)
        if step.reset_obs:
            self._write(step.reset_obs, first)

    def _write(self, obs: ObsBatch, first: int, maskless: np.ndarray | None = None) -> None:
        at = first + obs.env_ids
        self._check_layout(obs.observations, (len(at),))
        self._write_obs(at, obs.observations)
        if self._masks is None:
            return
        in_observation = self.env_spec.obs_layout.mask_key is not None
        for index, env_id in enumerate(at.tolist()):
            if maskless is None or not maskless[index]:
                mask = obs.observations[MASK][index] if in_observation else obs.mask_of(index)
                self._masks[env_id] = check_mask(self.env_spec.action_layout, mask)

    # -- checking the first steps --------------------------------------------------------------------------------------

    def _check_step(self, vector: VectorAdapter, step: VectorStep) -> None:
        for name, what, kinds in (
            ("rewards", "number", "fiu"),
            ("terminated", "bool", "b"),
            ("truncated", "bool", "b"),
        ):
            given = np.asarray(getattr(step, name))
            if given.shape != (vector.size,) or given.dtype.kind not in kinds:
                raise UsageError(
                    f"step() of the vector environment must return {name} as one {what} per "
                    f"environment ({vector.size}), not {given.dtype} of shape {given.shape}."
                )
        self._check(vector, step.obs, "step", np.asarray(step.rewards))
        if step.reset_obs:
            self._check(vector, step.reset_obs, "reset")

    def _check(self, vector: VectorAdapter, obs: ObsBatch, method: str, rewards: np.ndarray | None = None) -> None:
        for index in range(len(obs.env_ids)):
            observation = select_one(vector.observation_space, obs.observations, index)
            check_observation(vector.observation_space, observation, method, 0.0 if rewards is None else rewards[index])
        may_have_masks = self.env_spec.action_layout.mask_width and not self.env_spec.ignores_masks
        if self._masks is None and may_have_masks and obs.mask_of(0) is not None:
            raise UsageError(UNANNOUNCED_MASK)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: their state is not accessible."""
        return [None] * self.n_envs

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Start new episodes; open ones cannot be restored."""
        self.start(np.array([point.episode + 1 for point in points]))
        return [Difference("the state of a vector environment cannot be restored", is_lost=True)] * self.n_envs

    def statistics(self) -> Statistics:
        """The running means in wrappers around the vector environment."""
        return self._vectors[0].statistics()  # only EnvPool has several, and it has no wrappers

    def load_statistics(self, state: Statistics, *, freeze: bool = False) -> None:
        """Continue from `statistics`."""
        self._vectors[0].load_statistics(state, freeze=freeze)

    def close(self) -> None:
        """Close all environments."""
        for vector in self._vectors:
            vector.close()


def make_vector_envs(
    maker: EnvMaker,
    env_spec: EnvSpec,
    n_envs: int,
    seed: int,
    first_index: int = 0,
    slices: int = 1,
    checked_steps: int = _CHECKED_STEPS,
) -> VectorHostEnvs:
    """As many environments as the factory creates; of EnvPool `n_envs`, in `slices` pools."""
    return VectorHostEnvs(_make_vectors(maker, n_envs, slices), env_spec, seed, first_index, checked_steps)


def vector_size(maker: EnvMaker) -> int | None:
    """Call the factory to find out how many environments it creates; None if it creates single ones."""
    if maker.kind != "unknown":
        return None
    with wrap_errors("The environment failed in the test steps before training"), maker.probed() as env:
        return int(getattr(env, "unwrapped", env).num_envs) if adapter_for(env) else None


def _make_vectors(maker: EnvMaker, n_envs: int, slices: int) -> list[VectorAdapter]:
    if maker.kind == "envpool":
        parts = np.array_split(np.arange(n_envs), min(slices, n_envs))
        return [EnvPoolVector(maker, len(part)) for part in parts]
    env = maker.single_or_vector()
    try:
        adapter = adapter_for(env)
        assert adapter is not None
        return [adapter.load()(env, maker.name)]
    except UsageError:
        env.close()
        raise


def probe_vector(vector: VectorAdapter, discretize: int | None, seed: int, *, use_masks: bool = True) -> EnvSpec:
    """`probe` for a vector environment."""
    space = vector.observation_space
    actions = ActionLayout.of(vector.action_space, discretize)
    ObservationLayout.of(space)  # refuse an unsupported space before the first step
    obs = vector.reset([seed + env_id for env_id in range(vector.size)])
    mask = mask_from(select_one(space, obs.observations, 0), {MASK: obs.mask_of(0)}, space)
    obs_layout = ObservationLayout.of(space, actions.mask_width if mask is not None and use_masks else 0)
    env_spec = EnvSpec(obs_layout, actions, step_seconds=0.0, vectorised=True, ignores_masks=not use_masks)
    envs = VectorHostEnvs([vector], env_spec, seed)
    envs.start(np.zeros(envs.n_envs, np.int64))
    rng = np.random.default_rng(seed)
    times = StepTimes()
    while not times.is_enough:
        write_random_actions(envs, rng)
        began = perf_counter()
        envs.send([0])
        envs.recv(1)
        times.add_step(perf_counter() - began)
    return replace(env_spec, step_seconds=times.per_step() / envs.n_envs)


def write_random_actions(envs: VectorHostEnvs, rng: np.random.Generator) -> None:
    """Write a random action for each environment to the block, one that its mask allows."""
    obs_layout, actions = envs.env_spec.obs_layout, envs.env_spec.action_layout
    masks = obs_layout.mask_view(envs.block.obs) if obs_layout.mask_width else [None] * envs.n_envs
    envs.block.actions[:] = [random_flat_action(actions, rng, mask) for mask in masks]


def decode_batch(layout: ActionLayout, actions: np.ndarray) -> Any:
    """`ActionLayout.decode` for a batch [N, width]: structured like the space, each leaf [N, …]."""
    return rebuild(layout.space, {part.path: _decode_part(part, actions[:, part.columns]) for part in layout.parts})


def _decode_part(part: Part, values: np.ndarray) -> np.ndarray:
    space: Any = part.space
    if isinstance(space, spaces.Discrete):
        return space.start + values[:, 0].astype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return values.astype(space.dtype).reshape(-1, *space.nvec.shape) + space.start
    if part.bins is not None:
        chosen = values.astype(np.int64).reshape(-1, *space.shape)
        return np.take_along_axis(part.bins, chosen, 0)
    if space.dtype.kind in "iub":
        values = np.rint(values)
    elif space.dtype == np.float64:
        # Close float64 bounds (a joint locked at 0.1) may have no float32 between them.
        values = np.minimum(np.maximum(values, space.low.ravel()), space.high.ravel())
    return values.astype(space.dtype).reshape(-1, *space.shape)
