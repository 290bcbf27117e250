"""Probes of what is on the device: environments that live there, the way to it, and the room on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

import torch

from unidle.engine.collect.device import DeviceCollector
from unidle.engine.learn.device_loop import DeviceLoop
from unidle.engine.learn.learner import Learner
from unidle.engine.parts import Parts
from unidle.errors import UsageError
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import Timeline
from unidle.tuning.job import ENDLESS
from unidle.tuning.probes.timing import seconds_of, usual

_Given = ParamSpec("_Given")
_Told = TypeVar("_Told")
_COPIED_BYTES = 64 * 2**20


def time_on_device(
    parts: Parts, collector: DeviceCollector, batch: int, seed: int, share: float
) -> tuple[float, float]:
    """Seconds of a rollout, and of learning from it; where they are one graph, the rollout counts as learning."""
    collector.start()
    if parts.loop is not None:
        return 0.0, _whole_iteration(parts.loop, batch, share)
    device = parts.algo.parameters.flat.device
    learner = Learner(parts.algo, Timeline())
    collecting, learning = list[float](), list[float]()
    until = perf_counter() + 2 * share
    while len(learning) < 4 or perf_counter() < until:
        began = perf_counter()
        lane = collector.finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        middle = perf_counter()
        learner.begin(lane, 0.5, keyed_generator(device, seed, SHUFFLE, len(learning)))
        while learner.advance():
            pass
        learner.numbers()
        collecting.append(middle - began)
        learning.append(perf_counter() - middle)
        collector.settle()
        collector.open()
    return usual(collecting[1:]), usual(learning[1:])


def _whole_iteration(loop: DeviceLoop, batch: int, share: float) -> float:
    """Seconds of an iteration in a burst as long as the trainer's."""
    most = 1000
    number = loop.run(0, 1, batch, ENDLESS)[0]
    number += loop.run(number, most, batch, ENDLESS)[0]  # how long it takes decides how many are in the next burst
    spent = list[float]()
    until = perf_counter() + 2 * share
    while len(spent) < 3 or perf_counter() < until:
        began = perf_counter()
        count = loop.run(number, most, batch, ENDLESS)[0]
        spent.append((perf_counter() - began) / count)
        number += count
    return usual(spent)


def copy_rates(share: float) -> tuple[float, float]:
    """Bytes a second from page-locked memory to the GPU, and back."""
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.zeros_like(here, device="cuda")

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return _COPIED_BYTES / seconds_of(copy, share / 4)

    return rate(there, here), rate(here, there)


def steps_with_room(bytes_per_place: int, device: torch.device) -> int:
    """Steps that may be remembered in a quarter of what is free on the GPU."""
    return int(torch.cuda.mem_get_info(device)[0]) // 4 // bytes_per_place


def if_it_fits(probe: Callable[_Given, _Told | None]) -> Callable[_Given, _Told | None]:
    """A probe that tells None where what it tries does not fit beside the job, and never leaves anything in memory.

    A UsageError is such a case too: of a memory of steps for which there is so little room that it refuses to be one.
    """

    @wraps(probe)
    def tried(*given: _Given.args, **more: _Given.kwargs) -> _Told | None:
        try:
            with suppress(torch.OutOfMemoryError, UsageError):
                return probe(*given, **more)
            return None
        finally:
            give_memory_back()  # only here is the error gone, which holds on to all that was tried

    return tried


def give_memory_back() -> None:
    """Have nothing that nobody needs any more stay in memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
