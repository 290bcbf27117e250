"""A longer look at an environment than training takes: what `unidle check-env` does."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from unidle.envs.check import check_mask, check_observation, check_outcome
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec, mask_from, probe, random_action
from unidle.envs.vector.host_envs import put_random_actions, vectorised_envs
from unidle.errors import reported
from unidle.spaces.observations import image_axes

_STEPS = 1000
_POOL = 4  # environments, where it is for us to say how many step together


@dataclass
class Findings:
    """What was checked, what the environment is, and what is allowed but worth knowing."""

    env: str
    steps: int = 0
    episodes: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def examine(maker: EnvMaker, steps: int = _STEPS) -> Findings:
    """Step an environment with random actions and check everything it returns; UsageError at the first breach."""
    env_spec = probe(maker)
    found = Findings(maker.name)
    play = _play_together if env_spec.vectorised else _play
    with reported("The environment failed while it was checked"):
        first, second = (play(maker, env_spec, steps, 1, found if once else None) for once in (True, False))
    if not all(np.array_equal(a, b) for a, b in zip(first, second)):
        found.remarks.append(
            "two episodes from the same seed differ, so runs cannot be repeated or resumed exactly; "
            "draw everything random from self.np_random."
        )
    obs, actions = env_spec.obs_layout, env_spec.action_layout
    found.facts = {
        "observation": str(obs.space).replace("\n", " "),
        "action": str(actions.space).replace("\n", " "),
        "action mask": "yes" if obs.mask_width else "no",
        "step": f"{env_spec.step_seconds * 1e6:.0f} µs",
    }
    if not found.episodes:
        found.remarks.append(f"no episode ended within {steps} steps; if none ever does, add a time limit.")
    found.remarks += _remarks(obs.space, actions.space)
    return found


def _play(maker: EnvMaker, env_spec: EnvSpec, steps: int, seed: int, found: Findings | None) -> list[np.ndarray]:
    """Every observation and reward of `steps` random steps, packed; all of them checked."""
    env = maker()
    rng = np.random.default_rng(seed)
    seen = []
    try:
        observation, info = check_outcome(env.reset(seed=seed), 2, "reset")
        for _ in range(steps):
            mask = mask_from(observation, info, env_spec.obs_layout.space) if env_spec.obs_layout.mask_width else None
            flat = check_mask(env_spec.action_layout, mask) if env_spec.obs_layout.mask_width else None
            outcome = check_outcome(env.step(random_action(env_spec.action_layout, rng, flat)), 5, "step")
            observation, reward, terminated, truncated, info = outcome
            check_observation(env.observation_space, observation, "step", reward)
            seen.append(
                np.append(env_spec.obs_layout.pack(observation), np.frombuffer(np.float64(reward).tobytes(), np.uint8))
            )
            if found:
                found.steps += 1
                found.episodes += bool(terminated or truncated)
            if terminated or truncated:
                observation, info = check_outcome(env.reset(seed=seed + len(seen)), 2, "reset")
                check_observation(env.observation_space, observation, "reset")
    finally:
        env.close()
    return seen


def _play_together(
    maker: EnvMaker, env_spec: EnvSpec, steps: int, seed: int, found: Findings | None
) -> list[np.ndarray]:
    """`_play` for environments that step together: `steps` in all, rounded up."""
    envs = vectorised_envs(maker, env_spec, _POOL, seed, checked_steps=steps)
    rng = np.random.default_rng(seed)
    seen = []
    with contextlib.closing(envs):
        envs.start(np.zeros(envs.n_envs, np.int64))
        for _ in range(-(-steps // envs.n_envs)):
            put_random_actions(envs, rng)
            envs.send([0])
            envs.recv(1)
            block = envs.block
            seen += [block.obs.copy(), block.reward.copy()]
            if found:
                found.steps += envs.n_envs
                found.episodes += int((block.terminated | block.truncated).sum())
    return seen


def _remarks(observation: spaces.Space, action: spaces.Space) -> list[str]:
    remarks = []
    if isinstance(action, spaces.Box) and not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
        remarks.append("the action space is unbounded, so actions are not scaled; bound it if the scale is known.")
    is_picture = observation.dtype == np.uint8 and image_axes(observation.shape or ()) is not None
    if isinstance(observation, spaces.Box) and not is_picture:
        bounds = np.stack([observation.low, observation.high]).astype(np.float64)
        widest = np.abs(np.where(np.isfinite(bounds), bounds, 0)).max(initial=0)
        if widest > 100:
            remarks.append(f"observations reach {widest:g}; --normalize-obs is likely to help.")
    return remarks
