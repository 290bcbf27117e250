"""The pipeline model: how long an iteration takes under other engine settings, from what was measured under these.

Of one step of all environments, let t be bare stepping (by w workers), t' the same if they wait for each other after
it, i one service (inference for all), m the slices of a worker, S = w·m all slices, and k the services in which they
are served: 1 where all are served together, else about 4, for a quarter of the slices is worth a service.

- Served together, stepping and service take turns: t' + i.
- Served by slices, three things bound it: the worker's work, t; a slice's own round, t/m for its steps and i for its
  service, plus half a service in whose middle it became ready; and the server's work, k·i.
- Whoever computes needs a core: w·t of stepping and k·i of services share what cores there are.

Collecting is n_steps times that, plus what the real collector took more than this when it was measured: its notes and
waits, which are taken to stay; with graphs, where the job goes without, they are measured too. With overlap off, an
iteration is collecting + learning + rest. With strict overlap on a GPU it is max(collecting, learning) + rest. On a CPU
the trainer's thread serves, takes notes and learns, so that all this together bounds it too, and so do the cores for
everything together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from unidle.config import Engine
from unidle.engine.build import choose_slices, choose_workers
from unidle.engine.collect.host import QUICK_SECONDS
from unidle.envs.pool.process_pool import share_out
from unidle.tuning.probes.profile import Pace, Profile

# What the model knows how to follow; a change of any other setting is none of its business.
_FOLLOWED = ("device", "subproc", "workers", "slices", "threads", "graphs")
_LOOKS = 0.5  # services that a slice waits before its own, on average
_PARTS = 4  # services in which all slices are served, where they are not served together


def predicted_speedup(profile: Profile, now: Engine, then: Engine) -> float | None:
    """Steps a second under `then` over those under `now`; None where the model says nothing about the change."""
    fields = (f.name for f in dataclasses.fields(Engine))
    changed = [name for name in fields if getattr(now, name) != getattr(then, name)]
    if any(name not in _FOLLOWED for name in changed):
        return None
    before = iteration_seconds(profile, now, profile.overlap)
    after = iteration_seconds(profile, then, profile.overlap)
    return None if before is None or after is None else before / after


def overlap_speedup(profile: Profile, engine: Engine) -> float | None:
    """What the other kind of overlap is worth; None where the environments live on the device."""
    before = iteration_seconds(profile, engine, profile.overlap)
    after = iteration_seconds(profile, engine, "strict" if profile.overlap == "off" else "off")
    return None if before is None or after is None else before / after


def iteration_seconds(profile: Profile, engine: Engine, overlap: str) -> float | None:
    """Seconds of an iteration; None where the model cannot tell."""
    on_gpu = profile.on_gpu if engine.device == "auto" else engine.device == "cuda"
    pace = _pace(profile, engine, on_gpu)
    if profile.on_device or pace is None:
        return None
    layout = _layout(profile, engine, on_gpu, overlap)
    if layout is None:
        return None
    one, friction = _round(profile, layout, pace), _friction(profile, pace)
    collecting = max(0.5 * profile.n_steps * one.seconds, profile.n_steps * one.seconds + friction)
    if overlap == "off":
        return collecting + pace.learning + profile.rest
    bounds = [collecting, pace.learning]
    if not on_gpu:
        own = profile.n_steps * one.serving + max(0.0, friction) + pace.learning
        bounds += [own, (profile.n_steps * one.stepping + own) / profile.cores]
    return max(bounds) + profile.rest


def stepping_at(profile: Profile, workers: int, *, in_step: bool = False) -> float:
    """Seconds of one iteration's bare steps by so many workers: as measured, or scaled from what is nearest."""
    known = min(profile.stepping, key=lambda one: (abs(one.workers - workers), one.workers))
    seconds = known.in_step if in_step else known.seconds
    return seconds * _load(profile, workers) / _load(profile, known.workers)


def _load(profile: Profile, workers: int) -> float:
    """What the busiest worker has to do, in steps one after the other, cores shared where there are too few."""
    each = -(-profile.n_envs // max(1, workers))
    crowd = 1.0 if profile.waits else max(1.0, workers / profile.cores)
    return each * crowd


@dataclass(frozen=True)
class _Layout:
    """How environments are shared out."""

    workers: int
    slices: int  # in all
    together: bool  # all are served at once

    @property
    def of_a_worker(self) -> int:
        return max(1, self.slices // self.workers) if self.workers else 1


@dataclass(frozen=True)
class _Round:
    """One step of all environments, in seconds."""

    seconds: float
    serving: float  # of the trainer's thread
    stepping: float  # of all cores


def _layout(profile: Profile, engine: Engine, on_gpu: bool, overlap: str) -> _Layout | None:
    """What the trainer would choose; None where workers do not divide the environments and others are asked for."""
    present = profile.stepping[0]
    if profile.fixed_workers:
        if engine.workers not in (None, present.workers):
            return None
        return _laid_out(profile, present.workers, present.slices, on_gpu)
    is_busy = on_gpu or overlap == "strict"
    workers = choose_workers(engine, profile.n_envs, profile.step_seconds, is_busy=is_busy, cores=profile.cores)
    device = torch.device("cuda" if on_gpu else "cpu")
    slices = choose_slices(engine, profile.n_envs, workers, profile.step_seconds, device)
    every = sum(map(len, share_out(profile.n_envs, workers, slices))) if workers else 1
    return _laid_out(profile, workers, every, on_gpu)


def _laid_out(profile: Profile, workers: int, slices: int, on_gpu: bool) -> _Layout:
    quick = not on_gpu and profile.step_seconds * profile.n_envs / slices < QUICK_SECONDS
    return _Layout(workers, slices, quick or slices == 1)


def _round(profile: Profile, layout: _Layout, pace: Pace) -> _Round:
    t, i = stepping_at(profile, layout.workers) / profile.n_steps, pace.inference
    stepping = 0.0 if profile.waits else max(1, min(layout.workers, profile.cores)) * t
    if layout.together:
        whole = stepping_at(profile, layout.workers, in_step=True) / profile.n_steps + i
        is_here = layout.workers == 0 and not profile.fixed_workers  # the trainer's own thread steps as well
        return _Round(whole, whole, 0.0) if is_here else _Round(whole, i, stepping)
    k = min(_PARTS, layout.slices)
    own = t / layout.of_a_worker + (1 + _LOOKS) * i
    return _Round(max(t, own, k * i, (stepping + k * i) / profile.cores), k * i, stepping)


def _friction(profile: Profile, pace: Pace) -> float:
    """What collecting took more than the model says where it was measured: at this pace, or else at the job's own."""
    present, collecting = profile.stepping[0], pace.collecting
    if collecting is None:
        pace, collecting = profile.pace, profile.collecting
    layout = _laid_out(profile, present.workers, present.slices, profile.on_gpu)
    return collecting - profile.n_steps * _round(profile, layout, pace).seconds


def _pace(profile: Profile, engine: Engine, on_gpu: bool) -> Pace | None:
    """Of inference and learning under these settings; None where it was not measured."""
    if on_gpu != profile.on_gpu:
        return profile.elsewhere
    if on_gpu:
        return profile.pace if engine.graphs == profile.graphs else profile.graphed
    if engine.threads == profile.threads:
        return profile.pace
    learning = dict(profile.learning_by_threads).get(engine.threads)
    return None if learning is None else Pace(profile.pace.inference, learning)
