"""Hand-written `Facts` and `Profile` of a training job without problems, and changes to them."""

from __future__ import annotations

import dataclasses
from typing import Any

from unidle.config import Config, Engine, Run, recipe_for
from unidle.tuning.advice.facts import Facts, Readings, Table
from unidle.tuning.probes.profile import Pace, Profile, Stepping
from unidle.tuning.probes.stepping import StepStats

# 16 environments of 10 ms a step on 4 workers, and a core for the trainer: 40 ms for one step of all, 100 of them.
PROFILE = Profile(
    n_envs=16,
    n_steps=100,
    overlap="off",
    cores=5,
    on_gpu=False,
    on_device=False,
    fixed_workers=False,
    step_seconds=0.01,
    on_core=1.0,
    stepping=(Stepping(workers=4, slices=8, seconds=4.0, lockstep_seconds=4.2),),
    pace=Pace(inference=0.002, learning=2.0),
    collecting=4.0,
    rest=0.0,
)


def profile(**changes: Any) -> Profile:
    return dataclasses.replace(PROFILE, **changes)


def facts(
    *,
    profile_changes: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    readings: dict[str, Any] | None = None,
    **changes: Any,
) -> Facts:
    measured = profile(**(profile_changes or {}))
    settings = {"n_envs": measured.n_envs, "n_steps": measured.n_steps, "batch_size": 400, "overlap": measured.overlap}
    given: dict[str, Any] = {
        "config": Config(
            recipe_for(**{"algo": "sac" if changes.get("replay_on_host") else "ppo", **settings, **(recipe or {})}),
            Engine(**{"workers": 4, "slices": 2, **(engine or {})}),
            Run(env="any", **(run or {})),
        ),
        "profile": measured,
        "seconds": measured.collecting + measured.pace.learning + measured.rest,
        "table": Table(measured.on_gpu, 0.5 if measured.on_gpu else 0.0, {}, 0.5),
        "readings": Readings(**(readings or {})),
        "steps": StepStats(measured.step_seconds, 1.2 * measured.step_seconds, native=0.0, on_core=1.0, threads=1),
    }
    return Facts(**(given | changes))
