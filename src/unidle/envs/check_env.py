"""`unidle check-env`: steps an environment with random actions and checks everything it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from unidle.envs.make import EnvMaker
from unidle.envs.probe import probe
from unidle.envs.recorded_play import Record, play, play_vector
from unidle.envs.spec import EnvSpec
from unidle.envs.surviving_state import surviving
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.errors import wrap_errors
from unidle.formatting import short_time

_STEPS = 1000
_REPEATED_SHARE = 4  # one in this many steps is repeated in the same environment
_N_ENVS = 4  # for EnvPool; other vector environments have a fixed number
_WIDE = 100  # observations and rewards should have a scale of about 1
_SEED = 1


@dataclass
class CheckReport:
    """The number of checked steps, facts about the environment, and remarks that do not prevent training."""

    env: str
    steps: int = 0
    episodes: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def check_env(
    maker: EnvMaker, steps: int = _STEPS, progress: Callable[[int, int], None] = lambda done, total: None
) -> CheckReport:
    """Step an environment with random actions, repeatedly from the same seed; UsageError at the first problem.

    `progress` is called after each step with the steps so far and in total.
    """
    env_spec = probe(maker)
    counter = _Counter(progress, 2 * steps + (0 if env_spec.vectorised else steps // _REPEATED_SHARE))
    with wrap_errors("The environment failed during the check"):
        check = _check_vector if env_spec.vectorised else _check_single
        record, remarks = check(maker, env_spec, steps, counter)
    obs, actions = env_spec.obs_layout, env_spec.action_layout
    facts = {
        "observation": str(obs.space).replace("\n", " "),
        "action": str(actions.space).replace("\n", " "),
        "action mask": "yes" if obs.mask_width else "no",
        "step": short_time(env_spec.step_seconds),
    }
    taken = sum(map(len, record.rewards))
    if not record.episodes:
        remarks.append(f"no episode ended within {taken} steps; add a time limit if none ever ends.")
    return CheckReport(maker.name, taken, record.episodes, facts, [*remarks, *_remarks(record, actions.space)])


class _Counter:
    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, steps: int) -> None:
        self._done += steps
        self._progress(min(self._done, self._total), self._total)


def _check_single(
    maker: EnvMaker, env_spec: EnvSpec, steps: int, on_step: Callable[[int], None]
) -> tuple[Record, list[str]]:
    """Play in one environment, in a second one, and again in the first one, which has had episodes by then."""
    with contextlib.closing(maker()) as env:
        first = play(env, env_spec, steps, _SEED, on_step)
        with contextlib.closing(maker()) as other:
            difference = first.difference(play(other, env_spec, steps, _SEED, on_step))
        if difference:
            return first, [_not_repeated(difference)]
        again = play(env, env_spec, steps // _REPEATED_SHARE, _SEED, on_step)
    unsaved = surviving(first.attributes, again.attributes)
    return first, _dependence_on_past_episodes(first.difference(again), unsaved, env_spec.stateful_wrappers)


def _check_vector(
    maker: EnvMaker, env_spec: EnvSpec, steps: int, on_step: Callable[[int], None]
) -> tuple[Record, list[str]]:
    records = []
    for _ in range(2):
        with contextlib.closing(make_vector_envs(maker, env_spec, _N_ENVS, _SEED, checked_steps=steps)) as envs:
            records.append(play_vector(envs, steps, _SEED, on_step))
    difference = records[0].difference(records[1])
    return records[0], [_not_repeated(difference)] if difference else []


def _not_repeated(difference: str) -> str:
    return (
        f"two episodes from the same seed differ ({difference}), so runs cannot be reproduced or resumed exactly; draw "
        "all random numbers from self.np_random, and depend on no clock."
    )


def _dependence_on_past_episodes(
    difference: str | None, unsaved: tuple[str, ...], stateful_wrappers: tuple[str, ...]
) -> list[str]:
    """What to say of state that survives `reset`: whether episodes depend on it, and whether it is saved."""
    save = "give its class state_dict() and load_state_dict(), so that runs resume exactly."
    if unsaved:
        depends = f"episodes depend on earlier ones ({difference}): " if difference else ""
        condition = "" if difference else "if episodes come to depend on it, "
        return [f"{depends}{', '.join(unsaved)} survives reset(); {condition}{save}"]
    if difference and stateful_wrappers:
        return [
            f"episodes depend on earlier ones ({difference}) through the state of {' and '.join(stateful_wrappers)}, "
            "which is saved with a run; each environment has its own, in evaluation too."
        ]
    if difference:
        return [f"episodes depend on earlier ones ({difference}): something survives reset(); reset it, or {save}"]
    return []


def _remarks(record: Record, action: spaces.Space) -> list[str]:
    remarks = []
    if isinstance(action, spaces.Box) and not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
        remarks.append("the action space is unbounded, so actions are not scaled; set bounds if you know the scale.")
    name, widest = max(record.widest.items(), key=lambda part: part[1], default=("", 0.0))
    if widest > _WIDE:
        what = "observations reach" if name == "observation" else f"{name} reaches"
        remarks.append(f"{what} {widest:g}; --normalize-obs is likely to help.")
    largest = max((abs(reward) for rewards in record.rewards for reward in rewards), default=0.0)
    if largest > _WIDE:
        remarks.append(f"rewards reach {largest:g}; for PPO, --normalize-reward is likely to help.")
    if largest == 0.0:
        remarks.append("every reward was 0; learning needs rewards that exploration finds.")
    return remarks
