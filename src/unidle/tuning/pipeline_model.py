"""The pipeline model: predicts the duration of an iteration under other engine settings from measurements of the job.

For one step of all environments, let t be the time of bare stepping with w workers, t' the same if all environments
wait for each other, i the time of one inference for all, m the slices per worker, S = w·m all slices, and k the number
of inference calls: 1 if all slices are inferred together, else about 4, since a quarter of the slices trigger a call.

- Together, stepping and inference alternate: t' + i.
- By slices, the maximum of three: a worker's work, t; a slice's round trip, t/m for its steps plus i for its inference
  plus half an inference that is running when it becomes ready; and the inference work, k·i.
- Computing needs cores: w·t of stepping and k·i of inference share the available ones.

Collecting takes n_steps times that, plus the overhead of the real collector beyond this model (staging, waiting), which
is assumed constant; for a job without CUDA graphs it is also measured with graphs. With overlap off, an iteration is
collecting + learning + rest. With strict overlap on a GPU it is max(collecting, learning) + rest. On a CPU the
trainer's thread does inference, staging and learning, so their sum is a bound too, and so is all work divided by cores.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from unidle.config import Engine
from unidle.engine.collect.host import QUICK_SECONDS
from unidle.engine.placement import choose_slices, choose_workers
from unidle.envs.pool.process_pool import split_envs
from unidle.tuning.probes.profile import Pace, Profile

# Settings that the model covers.
_MODELLED = ("device", "subproc", "workers", "slices", "threads", "graphs")
_WAIT = 0.5  # inference calls that a slice waits before its own, on average
_CALLS = 4  # inference calls per step of all slices, if they are not inferred together


def predicted_speedup(profile: Profile, now: Engine, then: Engine) -> float | None:
    """Return steps/s under `then` divided by steps/s under `now`; None if the model does not cover the change."""
    fields = (f.name for f in dataclasses.fields(Engine))
    changed = [name for name in fields if getattr(now, name) != getattr(then, name)]
    if any(name not in _MODELLED for name in changed):
        return None
    before = iteration_seconds(profile, now, profile.overlap)
    after = iteration_seconds(profile, then, profile.overlap)
    return None if before is None or after is None else before / after


def overlap_speedup(profile: Profile, engine: Engine) -> float | None:
    """Return the speed-up of switching overlap on or off; None for environments on the device."""
    before = iteration_seconds(profile, engine, profile.overlap)
    after = iteration_seconds(profile, engine, "strict" if profile.overlap == "off" else "off")
    return None if before is None or after is None else before / after


def iteration_seconds(profile: Profile, engine: Engine, overlap: str) -> float | None:
    """Return the predicted seconds of an iteration; None if the model does not cover it."""
    on_gpu = profile.on_gpu if engine.device == "auto" else engine.device.startswith("cuda")
    pace = _pace(profile, engine, on_gpu)
    if profile.on_device or pace is None:
        return None
    layout = _layout(profile, engine, on_gpu, overlap)
    if layout is None:
        return None
    one, overhead = _round(profile, layout, pace), _overhead(profile, pace)
    collecting = max(0.5 * profile.n_steps * one.seconds, profile.n_steps * one.seconds + overhead)
    if overlap == "off":
        return collecting + pace.learning + profile.rest
    bounds = [collecting, pace.learning]
    if not on_gpu:
        own = profile.n_steps * one.inference + max(0.0, overhead) + pace.learning
        bounds += [own, (profile.n_steps * one.stepping + own) / profile.cores]
    return max(bounds) + profile.rest


def stepping_at(profile: Profile, workers: int, *, lockstep: bool = False) -> float:
    """Return the seconds of bare stepping per iteration with `workers`: measured, or scaled from the nearest count."""
    known = min(profile.stepping, key=lambda one: (abs(one.workers - workers), one.workers))
    seconds = known.lockstep_seconds if lockstep else known.seconds
    return seconds * _load(profile, workers) / _load(profile, known.workers)


def _load(profile: Profile, workers: int) -> float:
    """Return the sequential steps of the busiest worker, scaled up if workers share cores."""
    each = -(-profile.n_envs // max(1, workers))
    crowd = 1.0 if profile.waits else max(1.0, workers / profile.cores)
    return each * crowd


@dataclass(frozen=True)
class _Layout:
    """How environments are divided into workers and slices."""

    workers: int
    slices: int  # of all workers
    in_lockstep: bool  # one inference call for all slices

    @property
    def per_worker(self) -> int:
        return max(1, self.slices // self.workers) if self.workers else 1


@dataclass(frozen=True)
class _Round:
    """One step of all environments, in seconds."""

    seconds: float
    inference: float  # on the trainer's thread
    stepping: float  # summed over cores


def _layout(profile: Profile, engine: Engine, on_gpu: bool, overlap: str) -> _Layout | None:
    """Return the layout the trainer would choose; None if the number of workers is fixed and another is requested."""
    present = profile.stepping[0]
    if profile.fixed_workers:
        if engine.workers not in (None, present.workers):
            return None
        return _make_layout(profile, present.workers, present.slices, on_gpu)
    is_busy = on_gpu or overlap == "strict"
    workers = choose_workers(engine, profile.n_envs, profile.step_seconds, is_busy=is_busy, cores=profile.cores)
    device = torch.device("cuda" if on_gpu else "cpu")
    slices = choose_slices(engine, profile.n_envs, workers, profile.step_seconds, device)
    every = sum(map(len, split_envs(profile.n_envs, workers, slices))) if workers else 1
    return _make_layout(profile, workers, every, on_gpu)


def _make_layout(profile: Profile, workers: int, slices: int, on_gpu: bool) -> _Layout:
    quick = not on_gpu and profile.step_seconds * profile.n_envs / slices < QUICK_SECONDS
    return _Layout(workers, slices, quick or slices == 1)


def _round(profile: Profile, layout: _Layout, pace: Pace) -> _Round:
    t, i = stepping_at(profile, layout.workers) / profile.n_steps, pace.inference
    stepping = 0.0 if profile.waits else max(1, min(layout.workers, profile.cores)) * t
    if layout.in_lockstep:
        whole = stepping_at(profile, layout.workers, lockstep=True) / profile.n_steps + i
        in_trainer = layout.workers == 0 and not profile.fixed_workers  # the trainer's thread also steps
        return _Round(whole, whole, 0.0) if in_trainer else _Round(whole, i, stepping)
    k = min(_CALLS, layout.slices)
    own = t / layout.per_worker + (1 + _WAIT) * i
    return _Round(max(t, own, k * i, (stepping + k * i) / profile.cores), k * i, stepping)


def _overhead(profile: Profile, pace: Pace) -> float:
    """Return measured minus modelled collecting time, at this pace or else at the job's own."""
    present, collecting = profile.stepping[0], pace.collecting
    if collecting is None:
        pace, collecting = profile.pace, profile.collecting
    layout = _make_layout(profile, present.workers, present.slices, profile.on_gpu)
    return collecting - profile.n_steps * _round(profile, layout, pace).seconds


def _pace(profile: Profile, engine: Engine, on_gpu: bool) -> Pace | None:
    """Return the pace of inference and learning under these settings; None if it was not measured."""
    if on_gpu != profile.on_gpu:
        return profile.other_device
    if on_gpu:
        return profile.pace if engine.graphs == profile.graphs else profile.graphed
    if engine.threads == profile.threads:
        return profile.pace
    learning = dict(profile.learning_by_threads).get(engine.threads)
    return None if learning is None else Pace(profile.pace.inference, learning)
