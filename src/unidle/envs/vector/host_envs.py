"""Vector environments of other libraries as HostEnvs, in the trainer's process.

Their episodes cannot be seeded one by one and their state cannot be restored: a resumed run starts new episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from unidle.envs.adapter_registry import adapter_for
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec, mask_from, random_flat_action
from unidle.envs.step_times import StepTimes
from unidle.envs.vector.adapters import VectorAdapter, select_one
from unidle.envs.vector.part import CHECKED_STEPS, VectorPart, make_vector
from unidle.envs.vector.vector_wrappers import Statistics
from unidle.errors import wrap_errors
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout

LOST = Difference("the state of a vector environment cannot be restored", is_lost=True)


class VectorHostEnvs:
    """Vector environments on one block, stepped in this process; each is a slice."""

    workers = 0

    def __init__(
        self,
        vectors: Sequence[VectorAdapter],
        env_spec: EnvSpec,
        seed: int,
        first_index: int = 0,
        checked_steps: int = CHECKED_STEPS,
    ) -> None:
        """Every environment's first `checked_steps` steps are checked in full."""
        self.env_spec = env_spec
        ends = np.cumsum([vector.size for vector in vectors]).tolist()
        self.bounds, self.n_envs = list(zip([0, *ends[:-1]], ends)), ends[-1]
        self.block = SharedBlock(env_spec, self.n_envs)
        self.faults: list[Fault] = []  # always empty: unidle cannot restart these
        self.restarted: list[int] = []
        self._parts = [
            VectorPart(vector, env_spec, self.block, first, seed, first_index, checked_steps)
            for vector, (first, _) in zip(vectors, self.bounds)
        ]
        self._in_flight: list[int] = []  # slices, the oldest first

    def start(self, episodes: np.ndarray) -> None:
        """Reset all environments and number their episodes as given."""
        self._in_flight = []
        for part, (first, end) in zip(self._parts, self.bounds):
            part.start(episodes[first:end])

    def send(self, slices: Sequence[int]) -> None:
        """Step these slices with the actions in the block."""
        for number in slices:
            self._parts[number].send()
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
            self._parts[done[-1]].recv()
        return sorted(done)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def states(self) -> list[dict[str, Any] | None]:
        """None for all: their state is not accessible."""
        return [None] * self.n_envs

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Start new episodes; open ones cannot be restored."""
        self.start(np.array([point.episode + 1 for point in points]))
        return [LOST] * self.n_envs

    def statistics(self) -> Statistics:
        """The running means in wrappers around the vector environment."""
        return self._parts[0].vector.statistics()  # several come from a native library, and have no wrappers

    def load_statistics(self, state: Statistics, *, freeze: bool = False) -> None:
        """Continue from `statistics`."""
        self._parts[0].vector.load_statistics(state, freeze=freeze)

    def close(self) -> None:
        """Close all environments."""
        for part in self._parts:
            part.vector.close()


def make_vector_envs(
    maker: EnvMaker,
    env_spec: EnvSpec,
    n_envs: int,
    seed: int,
    first_index: int = 0,
    slices: int = 1,
    checked_steps: int = CHECKED_STEPS,
) -> VectorHostEnvs:
    """As many environments as the factory creates; of a native library `n_envs`, in `slices` vector environments."""
    count = 1 if maker.native is None else min(slices, n_envs)
    sizes = [len(part) for part in np.array_split(np.arange(n_envs), count)]
    return VectorHostEnvs([make_vector(maker, size) for size in sizes], env_spec, seed, first_index, checked_steps)


class FixedBatch(NamedTuple):
    """The environments that a factory creates together."""

    n_envs: int
    on_device: bool


def fixed_batch(maker: EnvMaker) -> FixedBatch | None:
    """Call the factory to find out what it creates together; None if it creates single ones, or any number."""
    if maker.kind != "unknown":
        return None
    with wrap_errors("The environment failed in the test steps before training"), maker.probed() as env:
        adapter = adapter_for(env)
        return FixedBatch(int(getattr(env, "unwrapped", env).num_envs), adapter.on_device) if adapter else None


def vector_size(maker: EnvMaker) -> int | None:
    """How many environments the factory creates together; None as for `fixed_batch`."""
    batch = fixed_batch(maker)
    return batch.n_envs if batch else None


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
