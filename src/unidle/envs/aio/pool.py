"""Environments that wait, as the trainer has them: `AsyncSlots` in this process, taken back as they come.

A slice is one environment unless it is said otherwise: one slow page keeps nobody else waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.aio.slots import AsyncSlots
from unidle.envs.block import Block
from unidle.envs.faults import Fault, FaultTally
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec


class AsyncEnvs:
    """N AsyncEnvs behind one block, on one event loop in a thread of this process."""

    workers = 0

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        n_envs: int,
        seed: int,
        first_index: int = 0,
        slices: int | None = None,
        *,
        max_env_restarts: int = 10,
    ) -> None:
        """As many slices as there are environments, unless it is said otherwise.

        A step or reset that takes longer than the maker's `deadline` is cancelled, and its environment made anew.
        """
        self.env_spec, self.n_envs = env_spec, n_envs
        self.block = Block(env_spec, n_envs)
        cuts = [int(part[0]) for part in np.array_split(np.arange(n_envs), min(slices or n_envs, n_envs))]
        self.bounds = list(zip(cuts, [*cuts[1:], n_envs]))
        self.faults: list[Fault] = []
        self.renewed: list[int] = []  # always empty: no environment can fail while it waits
        self._tally = FaultTally(n_envs, first_index, max_env_restarts)
        self._in_flight = 0  # slices
        self._through: list[int] = []
        self._wanted = 1  # slices that `recv` waits for
        self._news = threading.Condition()  # guards the two
        self._slots = AsyncSlots(maker, env_spec, self.block, range(n_envs), seed, first_index, self._on_through)
        try:
            self._slots.make()
        except BaseException:
            self.close()
            raise

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""
        self._slots.start(episodes)
        self._note_faults()

    def send(self, slices: Sequence[int]) -> None:
        """Set these slices going on the actions in the block."""
        self._in_flight += len(slices)
        self._slots.begin([(number, *self.bounds[number]) for number in slices])

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        """The slices that have been stepped, in order; waits until there are `at_least` of them, or so many seconds."""
        with self._news:
            self._wanted = min(at_least, self._in_flight)
            self._news.wait_for(lambda: len(self._through) >= self._wanted, seconds)
            done, self._through = sorted(self._through), []
        self._in_flight -= len(done)
        for number in done:
            first, end = self.bounds[number]
            self._slots.step(first, end)
            self._tally.forgive(self.block, slice(first, end))
        self._note_faults()
        return done

    def take_story(self) -> dict[str, Any] | None:
        """See `AsyncSlots.take_story`."""
        return self._slots.take_story()

    def states(self) -> list[dict[str, Any] | None]:
        """None: there is nothing to be put into a checkpoint."""
        return self._slots.states()

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back (see `AsyncSlots.resume`); False where it is lost, and another began."""
        repeated = self._slots.resume(points)
        self._note_faults()
        return repeated

    def close(self) -> None:
        """Cancel what is in flight, close all environments and end the loop; a second time does nothing."""
        self._slots.close()

    def _on_through(self, number: int) -> None:
        with self._news:
            self._through.append(number)
            if len(self._through) >= self._wanted:
                self._news.notify()

    def _note_faults(self) -> None:
        for fault in self._slots.take_faults():
            self.faults.append(fault)
            self._tally.add(fault)
