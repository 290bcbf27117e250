"""Runs one update in parts, so that environments can be stepped in between.

On a GPU a part is the launch of a graph; on a CPU it is a minibatch.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from unidle.algos.metrics import Metrics, stacked
from unidle.algos.registry import Algorithm
from unidle.distributed.ranks import Ranks
from unidle.engine.collect.rollout_slot import FinishedRollout, RolloutSlot
from unidle.engine.learn.finite import all_finite
from unidle.timeline import LEARN, DeviceClock, Timeline

# Parts of an update in the GPU's queue at a time: enough that it never runs empty, few enough not to block launches.
_QUEUE_LENGTH = 3
_Update = Generator[None, None, Metrics]


class Learner:
    """One update at a time: `begin`, `advance` until it returns False, `metrics`."""

    def __init__(self, algo: Algorithm, timeline: Timeline, ranks: Ranks | None = None) -> None:
        """With `ranks`, metrics are means over them."""
        self._algo, self._ranks = algo, ranks
        on_gpu = algo.parameters.flat.is_cuda
        self._clock = DeviceClock(timeline) if on_gpu else None
        self._done = torch.cuda.Event() if on_gpu else None
        self._launched = [torch.cuda.Event() for _ in range(_QUEUE_LENGTH)] if on_gpu else []  # the oldest first
        self._update: _Update | None = None
        self._names: list[str] = []
        self._values = torch.empty(0)
        self.finite = torch.empty(0)  # [T, N] whether every value of a step is finite

    def begin(self, finished: RolloutSlot | FinishedRollout, progress: float, shuffle: torch.Generator) -> None:
        """Start an update from a finished rollout at `progress` (0 to 1 of the run)."""
        self._algo.set_progress(progress)
        self._update = self._learning(finished, shuffle)

    def _learning(self, finished: RolloutSlot | FinishedRollout, shuffle: torch.Generator) -> _Update:
        metrics = yield from self._algo.update_in_parts(finished.rollout, shuffle, finished.behaviour)
        self.finite = all_finite(self._algo.policy.encoder, finished.rollout)  # at the end, so that it delays no update
        metrics["experience_finite"] = self.finite.all()
        return metrics

    def advance(self) -> bool:
        """Launch (on a CPU: run) the next part of the update; False if there are no more."""
        assert self._update is not None
        update = self._update
        try:
            self._clock.launch(LEARN, lambda: next(update)) if self._clock else next(update)
        except StopIteration as end:
            metrics: Metrics = end.value
            self._names = list(metrics)
            values = stacked(metrics)
            if self._ranks is not None:
                self._ranks.mean_(values)
            if self._done is None:
                self._values = values
            else:
                if not self._values.numel():
                    self._values = torch.empty(len(values)).pin_memory()
                self._values.copy_(values, non_blocking=True)
                self._done.record()
            return False
        if self._launched:
            self._launched.append(self._launched.pop(0))
            self._launched[-1].record()
        return True

    def queue_is_full(self) -> bool:
        """Whether the GPU has enough queued work for now."""
        return bool(self._launched) and not self._launched[0].query()

    def is_done(self) -> bool:
        """Whether the device has finished the update."""
        return self._done is None or self._done.query()

    def metrics(self) -> dict[str, float]:
        """The update's metrics; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        if self._clock is not None:
            self._clock.read()
        return dict(zip(self._names, self._values.tolist()))
