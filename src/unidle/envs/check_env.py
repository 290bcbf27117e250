"""`unidle check-env`: steps an environment with random actions and checks everything it returns."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from unidle.envs.check import check_mask, check_observation, check_return_value
from unidle.envs.make import EnvMaker
from unidle.envs.probe import probe
from unidle.envs.spec import EnvSpec, mask_from, random_action
from unidle.envs.vector.host_envs import make_vector_envs, write_random_actions
from unidle.errors import wrap_errors
from unidle.spaces.observations import image_axes

_STEPS = 1000
_N_ENVS = 4  # for EnvPool; other vector environments have a fixed number


@dataclass
class CheckReport:
    """The number of checked steps, facts about the environment, and remarks that do not prevent training."""

    env: str
    steps: int = 0
    episodes: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def check_env(maker: EnvMaker, steps: int = _STEPS) -> CheckReport:
    """Step an environment with random actions, twice from the same seed; UsageError at the first problem."""
    env_spec = probe(maker)
    report = CheckReport(maker.name)
    play = _play_vector if env_spec.vectorised else _play
    with wrap_errors("The environment failed during the check"):
        first, second = (play(maker, env_spec, steps, 1, report if once else None) for once in (True, False))
    if not all(np.array_equal(a, b) for a, b in zip(first, second)):
        report.remarks.append(
            "two episodes from the same seed differ, so runs cannot be reproduced or resumed exactly; "
            "draw all random numbers from self.np_random."
        )
    obs, actions = env_spec.obs_layout, env_spec.action_layout
    report.facts = {
        "observation": str(obs.space).replace("\n", " "),
        "action": str(actions.space).replace("\n", " "),
        "action mask": "yes" if obs.mask_width else "no",
        "step": f"{env_spec.step_seconds * 1e6:.0f} µs",
    }
    if not report.episodes:
        report.remarks.append(f"no episode ended within {steps} steps; add a time limit if none ever ends.")
    report.remarks += _remarks(obs.space, actions.space)
    return report


def _play(maker: EnvMaker, env_spec: EnvSpec, steps: int, seed: int, report: CheckReport | None) -> list[np.ndarray]:
    """Check `steps` random steps and return the observation and reward of each as bytes."""
    env = maker()
    rng = np.random.default_rng(seed)
    seen = []
    try:
        observation, info = check_return_value(env.reset(seed=seed), 2, "reset")
        for _ in range(steps):
            mask = mask_from(observation, info, env_spec.obs_layout.space) if env_spec.obs_layout.mask_width else None
            flat = check_mask(env_spec.action_layout, mask) if env_spec.obs_layout.mask_width else None
            outcome = check_return_value(env.step(random_action(env_spec.action_layout, rng, flat)), 5, "step")
            observation, reward, terminated, truncated, info = outcome
            check_observation(env.observation_space, observation, "step", reward)
            seen.append(
                np.append(env_spec.obs_layout.pack(observation), np.frombuffer(np.float64(reward).tobytes(), np.uint8))
            )
            if report:
                report.steps += 1
                report.episodes += bool(terminated or truncated)
            if terminated or truncated:
                observation, info = check_return_value(env.reset(seed=seed + len(seen)), 2, "reset")
                check_observation(env.observation_space, observation, "reset")
    finally:
        env.close()
    return seen


def _play_vector(
    maker: EnvMaker, env_spec: EnvSpec, steps: int, seed: int, report: CheckReport | None
) -> list[np.ndarray]:
    """`_play` for a vector environment: at least `steps` environment steps in total."""
    envs = make_vector_envs(maker, env_spec, _N_ENVS, seed, checked_steps=steps)
    rng = np.random.default_rng(seed)
    seen = []
    with contextlib.closing(envs):
        envs.start(np.zeros(envs.n_envs, np.int64))
        for _ in range(-(-steps // envs.n_envs)):
            write_random_actions(envs, rng)
            envs.send([0])
            envs.recv(1)
            block = envs.block
            seen += [block.obs.copy(), block.reward.copy()]
            if report:
                report.steps += envs.n_envs
                report.episodes += int((block.terminated | block.truncated).sum())
    return seen


def _remarks(observation: spaces.Space, action: spaces.Space) -> list[str]:
    remarks = []
    if isinstance(action, spaces.Box) and not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
        remarks.append("the action space is unbounded, so actions are not scaled; set bounds if you know the scale.")
    is_picture = observation.dtype == np.uint8 and image_axes(observation.shape or ()) is not None
    if isinstance(observation, spaces.Box) and not is_picture:
        bounds = np.stack([observation.low, observation.high]).astype(np.float64)
        widest = np.abs(np.where(np.isfinite(bounds), bounds, 0)).max(initial=0)
        if widest > 100:
            remarks.append(f"observations reach {widest:g}; --normalize-obs is likely to help.")
    return remarks
