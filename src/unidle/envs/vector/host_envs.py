"""Environments that a library steps many at a time, behind the same block as all others.

Their episodes cannot be seeded one by one, nor their state be brought back: a resumed run begins new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.envs.block import Block
from unidle.envs.check import check_mask, check_observation
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker, vector_kind
from unidle.envs.pool.slot import episode_seed
from unidle.envs.spec import PROBE_SECONDS, PROBE_STEPS, UNANNOUNCED_MASK, EnvSpec, mask_from, random_row
from unidle.envs.vector.adapters import EnvPoolVector, GymnasiumVector, Outcome, Sb3Vector, Sight, Vector, one_of
from unidle.errors import UsageError, reported
from unidle.spaces.actions import ActionLayout, Part
from unidle.spaces.observations import MASK, ObservationLayout
from unidle.spaces.tree import rebuild

_CHECKED_STEPS = 8  # the first steps are checked in full; later ones only by what the learner sees


class VectorisedEnvs:
    """Vector environments behind one block; each is a slice of it."""

    workers = 0

    def __init__(
        self,
        vectors: Sequence[Vector],
        env_spec: EnvSpec,
        seed: int,
        first_index: int = 0,
        checked_steps: int = _CHECKED_STEPS,
    ) -> None:
        """Every environment's first `checked_steps` steps are checked in full."""
        self.env_spec, self._vectors = env_spec, vectors
        ends = np.cumsum([vector.size for vector in vectors]).tolist()
        self.bounds, self.n_envs = list(zip([0, *ends[:-1]], ends)), ends[-1]
        self.block = Block(env_spec, self.n_envs)
        self.faults: list[Fault] = []  # none that can be survived: these are not ours to start again
        self.renewed: list[int] = []
        self._seed, self._first_index = seed, first_index
        # Typed for one line, both take an array of lines, or a slice, as well.
        self._write: Any = env_spec.obs_layout.writer(self.block.obs)
        self._write_final = env_spec.obs_layout.writer(self.block.final_obs)
        self._masks = env_spec.obs_layout.mask_view(self.block.obs) if env_spec.obs_layout.mask_width else None
        self._returns, self._lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, np.int64)  # of open episodes
        self._unchecked = [checked_steps] * len(vectors)
        self._under_way: list[int] = []  # slices sent and not received, the oldest first
        self._steps = 0

    def start(self, episodes: np.ndarray) -> None:
        """Begin an episode everywhere and call it by the given number."""
        self._returns[:], self._lengths[:], self._under_way = 0.0, 0, []
        self.block.episode[:] = episodes
        for vector, (first, end) in zip(self._vectors, self.bounds):
            numbered = zip(range(first, end), episodes[first:end].tolist())
            seeds = [episode_seed(self._seed, self._first_index + line, episode) for line, episode in numbered]
            with reported("The vector environment failed at its reset"):
                seen = vector.reset(seeds)
                self._check(vector, seen, "reset")
                self._show(seen, first)

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""
        for number in slices:
            actions = decode_all(self.env_spec.action_layout, self.block.actions[slice(*self.bounds[number])])
            with self._reported():
                self._vectors[number].send(actions)
            self._under_way.append(number)

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """Slices that have been stepped, those sent first; a vector cannot be asked whether it is ready, so it waits.

        `seconds` makes no difference, therefore.
        """
        done: list[int] = []
        while self._under_way and len(done) < max(1, at_least):
            done.append(self._under_way.pop(0))
            with self._reported():
                self._take_in(done[-1], self._vectors[done[-1]].recv())
        return sorted(done)

    def _reported(self) -> contextlib.AbstractContextManager[None]:
        return reported(f"The vector environment failed in its step {self._steps}")

    def _take_in(self, number: int, outcome: Outcome) -> None:
        block, (first, end) = self.block, self.bounds[number]
        self._steps += 1
        if self._unchecked[number]:
            self._unchecked[number] -= 1
            self._check_step(self._vectors[number], outcome)
        # An episode that both ends and runs out of time has ended: nothing is to be expected after it.
        terminated, truncated = outcome.terminated, outcome.truncated & ~outcome.terminated
        ended = terminated | truncated
        block.reward[first:end] = outcome.rewards
        block.terminated[first:end], block.truncated[first:end] = terminated, truncated
        self._returns[first:end] += outcome.rewards
        self._lengths[first:end] += 1
        if ended.any():
            for line in np.flatnonzero(truncated).tolist():
                self._write_final(first + line, outcome.final_of(line))
            at = first + np.flatnonzero(ended)
            block.episode_return[at], block.episode_length[at] = self._returns[at], self._lengths[at]
            block.episode[at] += 1
            self._returns[at], self._lengths[at] = 0.0, 0
        # Where an episode's first observation comes apart from its last, the mask of the last is nobody's.
        self._show(outcome.seen, first, maskless=ended if outcome.firsts else None)
        if outcome.firsts:
            self._show(outcome.firsts, first)

    def _show(self, seen: Sight, first: int, maskless: np.ndarray | None = None) -> None:
        at = first + seen.lines
        self._write(at, seen.observations)
        if self._masks is None:
            return
        in_observation = self.env_spec.obs_layout.mask_key is not None
        for index, line in enumerate(at.tolist()):
            if maskless is None or not maskless[index]:
                mask = seen.observations[MASK][index] if in_observation else seen.mask_of(index)
                self._masks[line] = check_mask(self.env_spec.action_layout, mask)

    # -- checking the first steps --------------------------------------------------------------------------------------

    def _check_step(self, vector: Vector, outcome: Outcome) -> None:
        for name, what, kinds in (
            ("rewards", "number", "fiu"),
            ("terminated", "bool", "b"),
            ("truncated", "bool", "b"),
        ):
            given = np.asarray(getattr(outcome, name))
            if given.shape != (vector.size,) or given.dtype.kind not in kinds:
                raise UsageError(
                    f"step() of the vector environment must return {name} as one {what} for each of its "
                    f"{vector.size} environments, not {given.dtype} of shape {given.shape}."
                )
        self._check(vector, outcome.seen, "step", np.asarray(outcome.rewards))
        if outcome.firsts:
            self._check(vector, outcome.firsts, "reset")

    def _check(self, vector: Vector, seen: Sight, method: str, rewards: np.ndarray | None = None) -> None:
        for index in range(len(seen.lines)):
            observation = one_of(vector.observation_space, seen.observations, index)
            check_observation(vector.observation_space, observation, method, 0.0 if rewards is None else rewards[index])
        if self._masks is None and self.env_spec.action_layout.mask_width and seen.mask_of(0) is not None:
            raise UsageError(UNANNOUNCED_MASK)

    # -- leaving and coming back ---------------------------------------------------------------------------------------

    def states(self) -> list[dict[str, Any] | None]:
        """Nothing: what the environments hold is theirs."""
        return [None] * self.n_envs

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Begin new episodes; none can be brought back."""
        self.start(np.array([episode + 1 for episode, *_ in points]))
        return [False] * self.n_envs

    def close(self) -> None:
        """End all environments."""
        for vector in self._vectors:
            vector.close()


def vectorised_envs(
    maker: EnvMaker,
    env_spec: EnvSpec,
    n_envs: int,
    seed: int,
    first_index: int = 0,
    slices: int = 1,
    checked_steps: int = _CHECKED_STEPS,
) -> VectorisedEnvs:
    """As many environments as the factory makes at once; of EnvPool `n_envs`, in `slices` pools."""
    return VectorisedEnvs(_opened(maker, n_envs, slices), env_spec, seed, first_index, checked_steps)


def vector_size(maker: EnvMaker) -> int | None:
    """How many environments the factory makes at once, if that is for the factory to say; it is called to find out."""
    if maker.makes != "either":
        return None
    with reported("The environment failed while it was tried out"), maker.tried() as env:
        return int(getattr(env, "unwrapped", env).num_envs) if vector_kind(env) else None


def _opened(maker: EnvMaker, n_envs: int, slices: int) -> list[Vector]:
    if maker.makes == "many":
        parts = np.array_split(np.arange(n_envs), min(slices, n_envs))
        return [EnvPoolVector(maker, len(part)) for part in parts]
    env = maker.any()
    try:
        return [as_vector(env, maker.name)]
    except UsageError:
        env.close()
        raise


def as_vector(env: Any, name: str) -> Vector:
    """What one call of the factory made."""
    return Sb3Vector(env) if vector_kind(env) == "sb3" else GymnasiumVector(env, name)


def probe_vector(vector: Vector, discretize: int | None, seed: int) -> EnvSpec:
    """`probe` of environments that step together."""
    space = vector.observation_space
    actions = ActionLayout.of(vector.action_space, discretize)
    ObservationLayout.of(space)  # an unsupported space is said before anything is stepped
    seen = vector.reset([seed + line for line in range(vector.size)])
    mask = mask_from(one_of(space, seen.observations, 0), {MASK: seen.mask_of(0)}, space)
    obs_layout = ObservationLayout.of(space, actions.mask_width if mask is not None else 0)
    env_spec = EnvSpec(obs_layout, actions, step_seconds=0.0, vectorised=True)
    envs = VectorisedEnvs([vector], env_spec, seed)
    envs.start(np.zeros(envs.n_envs, np.int64))
    rng = np.random.default_rng(seed)
    seconds: list[float] = []
    while len(seconds) < PROBE_STEPS and sum(seconds) < PROBE_SECONDS:
        put_random_actions(envs, rng)
        began = perf_counter()
        envs.send([0])
        envs.recv(1)
        seconds.append(perf_counter() - began)
    return replace(env_spec, step_seconds=float(np.median(seconds)) / envs.n_envs)


def put_random_actions(envs: VectorisedEnvs, rng: np.random.Generator) -> None:
    """In the block, for each environment one that its mask allows."""
    obs_layout, actions = envs.env_spec.obs_layout, envs.env_spec.action_layout
    masks = obs_layout.mask_view(envs.block.obs) if obs_layout.mask_width else [None] * envs.n_envs
    envs.block.actions[:] = [random_row(actions, rng, mask) for mask in masks]


def decode_all(layout: ActionLayout, obs: np.ndarray) -> Any:
    """`ActionLayout.decode` for rows [N, width] at once: the structure of the space, each leaf [N, …]."""
    return rebuild(layout.space, {part.path: _decode_all(part, obs[:, part.columns]) for part in layout.parts})


def _decode_all(part: Part, values: np.ndarray) -> np.ndarray:
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
        # Between close bounds there may be no float32 at all (a joint locked at 0.1).
        values = np.minimum(np.maximum(values, space.low.ravel()), space.high.ravel())
    return values.astype(space.dtype).reshape(-1, *space.shape)
