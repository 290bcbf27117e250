"""Learning from one rollout, piece by piece, so that environments can be served in between.

On a GPU a piece is a graph that was launched; on a CPU it is a minibatch that was learned.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from unidle.algos.registry import Algorithm
from unidle.buffers.rollout import Rollout
from unidle.engine.collect.rollout_slot import Lane, Whole
from unidle.nn.encoder import Encoder
from unidle.timeline import LEARN, DeviceClock, Timeline

# Pieces that the device holds in its queue at a time: enough never to run dry, few enough that launching never blocks.
_AHEAD = 3
_Pieces = Generator[None, None, dict[str, Tensor]]


def all_finite(encoder: Encoder, rollout: Rollout) -> Tensor:
    """[T, N] whether all that came out of each step is finite."""
    finite = encoder.all_finite(rollout.obs[1:]) & torch.isfinite(rollout.rewards)
    # Where an episode was cut off, its true last observation is the one that came out of that step.
    finite = torch.nn.functional.pad(finite.view(-1), (0, 1))
    finite[rollout.final_at] &= encoder.all_finite(rollout.final_obs)
    return finite[:-1].view(rollout.shape)


class Learner:
    """One update at a time: `begin`, `advance` until there is nothing more to tell the device, `numbers`."""

    def __init__(self, algo: Algorithm, timeline: Timeline) -> None:
        self._algo = algo
        on_gpu = algo.parameters.flat.is_cuda
        self._clock = DeviceClock(timeline) if on_gpu else None
        self._over = torch.cuda.Event() if on_gpu else None
        self._launched = (
            [torch.cuda.Event() for _ in range(_AHEAD)] if on_gpu else []
        )  # the latest pieces, oldest first
        self._pieces: _Pieces | None = None
        self._names: list[str] = []
        self._values = torch.empty(0)
        self.finite = torch.empty(0)  # [T, N] whether what came out of each step was

    def begin(self, lane: Lane | Whole, progress: float, shuffle: torch.Generator) -> None:
        """Learn from the rollout of `lane` at `progress` (0 to 1 of the run)."""
        self._algo.set_progress(progress)
        self._pieces = self._learning(lane, shuffle)

    def _learning(self, lane: Lane | Whole, shuffle: torch.Generator) -> _Pieces:
        metrics = yield from self._algo.learning(lane.rollout, shuffle, lane.behaviour)
        self.finite = all_finite(self._algo.policy.encoder, lane.rollout)  # last: learning need not wait for it
        metrics["experience_finite"] = self.finite.all()
        return metrics

    def advance(self) -> bool:
        """Do, or launch, one more piece; False once there is none left."""
        assert self._pieces is not None
        pieces = self._pieces
        try:
            self._clock.launch(LEARN, lambda: next(pieces)) if self._clock else next(pieces)
        except StopIteration as end:
            metrics: dict[str, Tensor] = end.value
            self._names = list(metrics)
            values = torch.stack([value.float() for value in metrics.values()])
            if self._over is None:
                self._values = values
            else:
                if not self._values.numel():
                    self._values = torch.empty(len(values)).pin_memory()
                self._values.copy_(values, non_blocking=True)
                self._over.record()
            return False
        if self._launched:
            self._launched.append(self._launched.pop(0))
            self._launched[-1].record()
        return True

    def busy(self) -> bool:
        """Whether the device has enough to do for now."""
        return bool(self._launched) and not self._launched[0].query()

    def finished(self) -> bool:
        """Whether the device has done all it was told."""
        return self._over is None or self._over.query()

    def numbers(self) -> dict[str, float]:
        """The update's metrics; waits for the device if it is not done."""
        if self._over is not None:
            self._over.synchronize()
        if self._clock is not None:
            self._clock.read()
        return dict(zip(self._names, self._values.tolist()))
