"""Some environments of a run, stepped one after the other; a failing one is restarted without affecting the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slot import EnvSlot
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec
from unidle.errors import USER_EXCEPTIONS, TrainingError


@dataclass
class _SliceViews:
    """Views of one slice of the block, cached because creating them takes longer than using them."""

    slots: list[EnvSlot]
    skip: np.ndarray
    retry: np.ndarray
    truncated: np.ndarray
    numbers: list[np.ndarray]  # everything in a step that could be NaN or infinite, each [env, ..]
    final_numbers: list[np.ndarray]  # the same of final observations


class Slots:
    """The environments at `env_ids` of a block; env id 0 is environment `first_index` of the run.

    An environment that raises, or returns a NaN or infinite value, is closed, created again and started with its next
    episode, and `retry` is set. If it cannot be created or reset, a fallback observation is shown and its next step
    fails with the reason, so that every `retry` comes with a fault. A UsageError is not caught.
    """

    def __init__(
        self, maker: EnvMaker, env_spec: EnvSpec, block: SharedBlock, env_ids: range, seed: int, first_index: int
    ) -> None:
        """Environments are created by `make`, `start` or `restart`."""
        self._block = block
        self._slots = [EnvSlot(maker, first_index + env_id, env_id, seed, env_spec, block) for env_id in env_ids]
        self._floats = env_spec.obs_layout.float_views(block.obs)
        self._final_floats = env_spec.obs_layout.float_views(block.final_obs)
        self._slice_views: dict[tuple[int, int], _SliceViews] = {}
        self._fallback_obs: np.ndarray | None = None  # shown for an environment that could not be reset
        self._faults: list[Fault] = []

    def __iter__(self) -> Iterator[EnvSlot]:
        return iter(self._slots)

    def take_faults(self) -> list[Fault]:
        """Return the faults since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def make(self) -> None:
        """Create every environment; a failure is raised, because before training it is probably a mistake."""
        for slot in self._slots:
            slot.make()

    def start(self, episodes: np.ndarray) -> None:
        """Start the given episode in each environment, or the next one if that fails."""
        for slot, episode in zip(self._slots, episodes):
            self._start_episode(slot, int(episode))

    def restart(self, episodes: np.ndarray, fallback_obs: np.ndarray | None) -> None:
        """Start the given episodes in a worker that replaces a dead one."""
        self._fallback_obs = fallback_obs
        for slot, episode in zip(self._slots, episodes):
            slot.skip_checks()
            self._start_episode(slot, int(episode))

    def step(self, first: int, end: int) -> None:
        """Step environments `first` to `end`, except those in `block.skip`."""
        if (first, end) not in self._slice_views:
            self._slice_views[first, end] = self._make_views(first, end)
        views = self._slice_views[first, end]
        slots = views.slots
        if np.count_nonzero(views.skip):
            slots = [slot for slot, skipped in zip(slots, views.skip) if not skipped]
        views.retry &= views.skip
        for slot in slots:
            try:
                slot.step()
            except TrainingError as error:
                self._discard_step(slot, str(error))
        if not _is_finite(views):
            for slot in slots:
                text = self._not_finite(slot)
                if text is not None:
                    self._discard_step(slot, text)

    def _make_views(self, first: int, end: int) -> _SliceViews:
        block, slots = self._block, self._slots[first:end]
        env_ids = slice(slots[0].env_id, slots[-1].env_id + 1)
        return _SliceViews(
            slots,
            block.skip[env_ids],
            block.retry[env_ids],
            block.truncated[env_ids],
            [numbers[env_ids] for numbers in (block.reward, *self._floats)],
            [numbers[env_ids] for numbers in self._final_floats],
        )

    def states(self) -> list[dict[str, Any] | None]:
        """Return what a checkpoint holds of each environment (see `EnvSlot.state`)."""
        return [slot.state() for slot in self._slots]

    def resume(self, points: Sequence[OpenEpisode]) -> list[Difference | None]:
        """Restore each open episode (see `EnvSlot.resume`)."""
        differences: list[Difference | None] = []
        for slot, point in zip(self._slots, points):
            self._fallback_obs = point.obs.copy()
            try:
                differences.append(slot.resume(point))
            except TrainingError as error:
                self._restart_slot(slot, str(error))
                differences.append(Difference(str(error).splitlines()[0], is_lost=True))
        return differences

    def close(self) -> None:
        """Close every environment."""
        for slot in self._slots:
            with contextlib.suppress(*USER_EXCEPTIONS):  # it is not needed any more
                slot.close()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _start_episode(self, slot: EnvSlot, episode: int) -> None:
        try:
            slot.start_episode(episode)
            self._check_obs(slot)
        except TrainingError as error:
            self._restart_slot(slot, str(error))
        if self._fallback_obs is None:
            self._fallback_obs = self._block.obs[slot.env_id].copy()

    def _discard_step(self, slot: EnvSlot, text: str) -> None:
        """Restart an environment and discard the results of its step."""
        block, env_id = self._block, slot.env_id
        self._restart_slot(slot, text)
        block.retry[env_id] = True
        block.reward[env_id], block.terminated[env_id], block.truncated[env_id] = 0.0, False, False

    def _restart_slot(self, slot: EnvSlot, text: str) -> None:
        self._faults.append(Fault(slot.index, "exception", text))
        try:
            slot.restart()
            self._check_obs(slot)
        except TrainingError as error:
            slot.mark_failed(str(error))
            if self._fallback_obs is None:  # the very first start: there is no observation yet
                raise
            self._block.obs[slot.env_id] = self._fallback_obs

    # -- NaN and infinite values ---------------------------------------------------------------------------------------

    def _not_finite(self, slot: EnvSlot) -> str | None:
        """Describe the NaN or infinite value in an environment's step; None if there is none."""
        block, env_id = self._block, slot.env_id
        has_ended = bool(
            block.terminated[env_id] or block.truncated[env_id]
        )  # then the next episode has already started
        if not np.isfinite(block.reward[env_id]):
            what = "reward"
        elif block.truncated[env_id] and not _finite_at(self._final_floats, env_id):
            what = "observation"
        elif not _finite_at(self._floats, env_id):
            what, has_ended = "observation", False
        else:
            return None
        at = (
            slot.at(slot.episode - 1, block.episode_length[env_id]) if has_ended else slot.at(slot.episode, slot.length)
        )
        return f"Environment {slot.index} returned a NaN or infinite {what} in {at}."

    def _check_obs(self, slot: EnvSlot) -> None:
        if not _finite_at(self._floats, slot.env_id):
            at = slot.at(slot.episode, slot.length)
            raise TrainingError(f"Environment {slot.index} returned a NaN or infinite observation in {at}.")


def _is_finite(views: _SliceViews) -> bool:
    """Whether everything in a step is finite; runs every step, so it checks a whole slice in a few calls."""
    cut = views.truncated
    return all(map(_all_finite, views.numbers)) and (
        np.count_nonzero(cut) == 0 or all(_all_finite(numbers[cut]) for numbers in views.final_numbers)
    )


def _finite_at(views: list[np.ndarray], env_id: int) -> bool:
    return all(_all_finite(numbers[env_id]) for numbers in views)


def _all_finite(numbers: np.ndarray) -> bool:
    return np.count_nonzero(np.isfinite(numbers)) == numbers.size  # twice as fast as all()
