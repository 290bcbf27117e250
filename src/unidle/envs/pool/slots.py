"""Some environments of a run, stepped one after the other; one that fails is made again beside the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidle.envs.block import Block
from unidle.envs.faults import Fault
from unidle.envs.make import EnvMaker
from unidle.envs.pool.slot import EnvSlot
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError


@dataclass
class _Span:
    """Views of the lines of one slice, made once: to make them anew would cost a step more than to look at them."""

    slots: list[EnvSlot]
    skip: np.ndarray
    redo: np.ndarray
    truncated: np.ndarray
    numbers: list[np.ndarray]  # all that a step shows that could be NaN or infinite, each [lines, ..]
    final_numbers: list[np.ndarray]  # and where an episode was truncated


class Slots:
    """The environments behind `lines` of a block, numbered from `first_index` at line 0.

    An environment that raises, or shows something that is not finite, is closed and made again, and begins its next
    episode; its line says `redo`. If it cannot be made or reset, it shows some first observation instead, and its next
    step fails with the reason: so wherever `redo` is said, there is a fault to tell. A UsageError goes through.
    """

    def __init__(
        self, maker: EnvMaker, env_spec: EnvSpec, block: Block, lines: range, seed: int, first_index: int
    ) -> None:
        """Environments are made by `make`, by `start` or by `renew`."""
        self._block = block
        self._slots = [EnvSlot(maker, first_index + line, line, seed, env_spec, block) for line in lines]
        self._floats = env_spec.obs_layout.float_views(block.obs)
        self._final_floats = env_spec.obs_layout.float_views(block.final_obs)
        self._spans: dict[tuple[int, int], _Span] = {}
        self._spare: np.ndarray | None = None  # a row to show where there is no environment
        self._faults: list[Fault] = []

    def __iter__(self) -> Iterator[EnvSlot]:
        return iter(self._slots)

    def take_faults(self) -> list[Fault]:
        """What failed since this was last asked."""
        faults, self._faults = self._faults, []
        return faults

    def make(self) -> None:
        """Make every environment; a failure is not survived here, where it is likely to be a mistake."""
        for slot in self._slots:
            slot.make()

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment, or the one after where that fails."""
        for slot, episode in zip(self._slots, episodes):
            self._begin(slot, int(episode))

    def renew(self, episodes: np.ndarray, spare: np.ndarray | None) -> None:
        """Begin the given episodes in the place of a worker that died."""
        self._spare = spare
        for slot, episode in zip(self._slots, episodes):
            slot.trust()
            self._begin(slot, int(episode))

    def step(self, first: int, end: int) -> None:
        """Step some of the environments, but for those that the block says to skip."""
        if (first, end) not in self._spans:
            self._spans[first, end] = self._span(first, end)
        span = self._spans[first, end]
        slots = span.slots
        if np.count_nonzero(span.skip):
            slots = [slot for slot, skipped in zip(slots, span.skip) if not skipped]
        span.redo &= span.skip
        for slot in slots:
            try:
                slot.step()
            except TrainingError as error:
                self._redo(slot, str(error))
        if not _is_finite(span):
            for slot in slots:
                text = self._not_finite(slot)
                if text is not None:
                    self._redo(slot, text)

    def _span(self, first: int, end: int) -> _Span:
        block, slots = self._block, self._slots[first:end]
        lines = slice(slots[0].line, slots[-1].line + 1)
        return _Span(
            slots,
            block.skip[lines],
            block.redo[lines],
            block.truncated[lines],
            [numbers[lines] for numbers in (block.reward, *self._floats)],
            [numbers[lines] for numbers in self._final_floats],
        )

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""
        return [slot.state() for slot in self._slots]

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `EnvSlot.resume`); False where it failed or went differently."""
        repeated = []
        for slot, point in zip(self._slots, points):
            self._spare = point[2].copy()
            try:
                repeated.append(slot.resume(*point))
            except TrainingError as error:
                self._renew(slot, str(error))
                repeated.append(False)
        return repeated

    def close(self) -> None:
        """Close every environment."""
        for slot in self._slots:
            with contextlib.suppress(Exception):  # nothing depends on it any more
                slot.close()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _begin(self, slot: EnvSlot, episode: int) -> None:
        try:
            slot.start_episode(episode)
            self._check_row(slot)
        except TrainingError as error:
            self._renew(slot, str(error))
        if self._spare is None:
            self._spare = self._block.obs[slot.line].copy()

    def _redo(self, slot: EnvSlot, text: str) -> None:
        """What this environment's step left behind counts for nothing."""
        block, line = self._block, slot.line
        self._renew(slot, text)
        block.redo[line] = True
        block.reward[line], block.terminated[line], block.truncated[line] = 0.0, False, False

    def _renew(self, slot: EnvSlot, text: str) -> None:
        self._faults.append(Fault(slot.index, "exception", text))
        try:
            slot.renew()
            self._check_row(slot)
        except TrainingError as error:
            slot.give_up(str(error))
            if self._spare is None:  # the first start of all: there is nothing to show
                raise
            self._block.obs[slot.line] = self._spare

    # -- numbers that are none -----------------------------------------------------------------------------------------

    def _not_finite(self, slot: EnvSlot) -> str | None:
        """What of an environment's step is not finite, in words."""
        block, line = self._block, slot.line
        before = bool(block.terminated[line] or block.truncated[line])  # the next episode has already begun
        if not np.isfinite(block.reward[line]):
            what = "reward"
        elif block.truncated[line] and not _finite_at(self._final_floats, line):
            what = "observation"
        elif not _finite_at(self._floats, line):
            what, before = "observation", False
        else:
            return None
        at = slot.at(slot.episode - 1, block.episode_length[line]) if before else slot.at(slot.episode, slot.length)
        return f"Environment {slot.index} returned a NaN or infinite {what} in {at}."

    def _check_row(self, slot: EnvSlot) -> None:
        if not _finite_at(self._floats, slot.line):
            at = slot.at(slot.episode, slot.length)
            raise TrainingError(f"Environment {slot.index} returned a NaN or infinite observation in {at}.")


def _is_finite(span: _Span) -> bool:
    """Whether all that a step left behind is finite: done each step, so a few quick calls for all lines together."""
    cut = span.truncated
    return all(map(_all_finite, span.numbers)) and (
        np.count_nonzero(cut) == 0 or all(_all_finite(numbers[cut]) for numbers in span.final_numbers)
    )


def _finite_at(views: list[np.ndarray], line: int) -> bool:
    return all(_all_finite(numbers[line]) for numbers in views)


def _all_finite(numbers: np.ndarray) -> bool:
    return np.count_nonzero(np.isfinite(numbers)) == numbers.size  # twice as quick as all()
