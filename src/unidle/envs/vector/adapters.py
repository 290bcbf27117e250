"""Three kinds of vector environment, made to say the same: what a step brought, and what begins after an end.

They differ in when an episode that ended begins anew, and where its last observation is found:

    Gymnasium, SAME_STEP    within the step; infos["final_obs"]
    Gymnasium, DISABLED     when asked, by reset(options={"reset_mask": …}), at once after the step; the step's own
    Gymnasium, NEXT_STEP    by the step after the end: a step that belongs to no episode and has no place in a rollout.
                            Sync- and AsyncVectorEnv are asked to reset as with DISABLED; others are refused
    Stable-Baselines3       within the step; infos[i]["terminal_observation"]
    EnvPool                 when asked, by reset(env_id), at once after the step; the step's own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from unidle.envs.check import check_outcome
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError
from unidle.spaces.observations import MASK
from unidle.spaces.tree import follow, rebuild, walk


@dataclass
class Sight:
    """What some environments show: k of them, an observation and maybe an action mask each."""

    lines: np.ndarray  # [k] which ones, counted from the first of the vector
    observations: Any  # in the structure of the space, each leaf [k, …]
    mask_of: Callable[[int], Any]  # the mask of the k-th, if it gave one in info


@dataclass
class Outcome:
    """What one step brought to all environments of a vector."""

    seen: Sight
    rewards: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final_of: Callable[[int], Any]  # the last observation of the episode that ended in that environment
    firsts: Sight | None  # of episodes that began after an end, unless `seen` shows them already


class Vector(Protocol):
    """Environments that take a step together; between `send` and `recv` they may be at it."""

    size: int
    observation_space: Any  # of one environment
    action_space: Any

    def reset(self, seeds: Sequence[int]) -> Sight:
        """Begin an episode in each environment, from these seeds if each can have its own, else from the first."""

    def send(self, actions: Any) -> None:
        """Take actions in the structure of the space, each leaf [N, …]."""

    def recv(self) -> Outcome:
        """What they brought, every ended episode followed by the first observation of the next."""

    def close(self) -> None:
        """End all environments."""


def one_of(space: spaces.Space, batch: Any, index: int) -> Any:
    """A single value out of a batch of them."""
    return rebuild(space, {path: follow(batch, path)[index] for path, _ in walk(space)})


def _some_of(space: spaces.Space, batch: Any, lines: np.ndarray) -> Any:
    """A copy of these lines of a batch."""
    return rebuild(space, {path: np.asarray(follow(batch, path))[lines] for path, _ in walk(space)})


class GymnasiumVector:
    """A `gymnasium.vector.VectorEnv`."""

    def __init__(self, env: Any, name: str) -> None:
        self._env, self.size = env, int(env.num_envs)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self._resets_itself = resets_itself(env, name)
        self._lines = np.arange(self.size)
        self._distrusted = not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))

    def reset(self, seeds: Sequence[int]) -> Sight:
        """Begin an episode in each environment."""
        observations, infos = check_outcome(self._env.reset(seed=seeds[0]), 2, "reset")
        return Sight(self._lines, observations, lambda line: _mask_in(infos, line))

    def send(self, actions: Any) -> None:
        """Take actions; workers, where there are some, set to it."""
        self._actions = actions
        if isinstance(self._env, AsyncVectorEnv):
            self._env.step_async(actions)

    def recv(self) -> Outcome:
        """What they brought."""
        is_async = isinstance(self._env, AsyncVectorEnv)
        outcome = self._env.step_wait() if is_async else self._env.step(self._actions)
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise UsageError("step() of the vector environment must return (observations, rewards, …): 5 parts.")
        observations, rewards, terminated, truncated, infos = outcome
        seen = Sight(self._lines, observations, lambda line: _mask_in(infos, line))
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        if self._resets_itself:
            return Outcome(seen, rewards, terminated, truncated, lambda line: _final_in(infos, line), None)
        ended = terminated | truncated
        if not ended.any():
            return Outcome(seen, rewards, terminated, truncated, lambda _: None, None)
        # Copies, before the reset: a vector environment may show all it shows in one and the same memory.
        cut_off = np.flatnonzero(truncated).tolist()
        lasts = {line: _copied(self.observation_space, observations, line) for line in cut_off}
        firsts = self._reset_some(ended, observations)
        return Outcome(seen, rewards, terminated, truncated, lasts.__getitem__, firsts)

    def _reset_some(self, ended: np.ndarray, observations: Any) -> Sight:
        going_on = np.flatnonzero(~ended)
        before = _some_of(self.observation_space, observations, going_on) if self._distrusted else None
        shown, infos = check_outcome(self._env.reset(options={"reset_mask": ended.copy()}), 2, "reset")
        if self._distrusted:
            after = _some_of(self.observation_space, shown, going_on)
            leaves = [(follow(before, path), follow(after, path)) for path, _ in walk(self.observation_space)]
            if not all(np.array_equal(a, b) for a, b in leaves):
                raise UsageError(
                    "The vector environment's autoreset_mode is DISABLED, but reset(options={'reset_mask': …}) also "
                    "changed environments outside the mask; let it reset only those where the mask is True."
                )
            self._distrusted = len(going_on) == 0  # there was nothing to see it by
        lines = np.flatnonzero(ended)
        firsts = _some_of(self.observation_space, shown, lines)
        return Sight(lines, firsts, lambda k: _mask_in(infos, int(lines[k])))

    def close(self) -> None:
        """End all environments."""
        self._env.close()


def resets_itself(env: Any, name: str) -> bool:
    """Whether a new episode begins within the step; False if it is to be asked for; UsageError if neither works."""
    mode = env.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)  # the enum came with Gymnasium 1.1
    if mode in ("SameStep", "Disabled"):
        return mode == "SameStep"
    if mode != "NextStep":
        raise UsageError(
            f"{name} does not say when it begins new episodes; set its metadata['autoreset_mode'] to "
            "gymnasium.vector.AutoresetMode.SAME_STEP or DISABLED, whichever it is."
        )
    inner = env.unwrapped
    # Without shared memory, an AsyncVectorEnv of Gymnasium 1.4 does not notice that it was reset.
    noticing = isinstance(inner, AsyncVectorEnv) and inner.shared_memory and inner.worker is None
    if isinstance(inner, SyncVectorEnv) or noticing:
        return False
    raise UsageError(
        f"{name} begins new episodes by an extra step ({type(inner).__name__} with autoreset_mode NEXT_STEP); "
        "make it with autoreset_mode=SAME_STEP, or by gymnasium.make_vec(…, vectorization_mode='sync')."
    )


def _copied(space: spaces.Space, batch: Any, line: int) -> Any:
    return rebuild(space, {path: np.array(follow(batch, path)[line]) for path, _ in walk(space)})


def _final_in(infos: dict[str, Any], line: int) -> Any:
    final = infos["final_obs"][line] if "final_obs" in infos else None
    if final is None:
        raise UsageError(
            f"The vector environment cut off an episode of environment {line} and began the next one, but "
            "infos['final_obs'] does not hold its last observation; add it, as AutoresetMode.SAME_STEP asks."
        )
    return final


def _mask_in(infos: dict[str, Any], line: int) -> Any:
    """The mask of one environment in the infos of all; Gymnasium notes under `_key` whose entries are real."""
    given = infos.get(MASK)
    if given is None or not infos.get(f"_{MASK}", np.ones(line + 1))[line]:
        return None
    return _entry(given, line)


def _entry(given: Any, line: int) -> Any:
    if isinstance(given, dict):
        return {key: _entry(part, line) for key, part in given.items() if not key.startswith("_")}
    return given[line]


class Sb3Vector:
    """A `VecEnv` of Stable-Baselines3."""

    def __init__(self, env: Any) -> None:
        self._env, self.size = env, int(env.num_envs)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._lines = np.arange(self.size)

    def reset(self, seeds: Sequence[int]) -> Sight:
        """Begin an episode in each environment."""
        self._env.seed(seeds[0])
        observations = self._env.reset()
        infos = self._env.unwrapped.reset_infos
        return Sight(self._lines, observations, lambda line: infos[line].get(MASK))

    def send(self, actions: Any) -> None:
        """Take actions; workers, where there are some, set to it."""
        if isinstance(self.action_space, (spaces.Dict, spaces.Tuple)):
            actions = [one_of(self.action_space, actions, line) for line in range(self.size)]
        self._env.step_async(actions)

    def recv(self) -> Outcome:
        """What they brought."""
        observations, rewards, dones, infos = self._env.step_wait()
        dones = np.asarray(dones, np.bool_)
        truncated = dones & np.array([bool(info.get("TimeLimit.truncated")) for info in infos])
        begun = self._env.unwrapped.reset_infos
        seen = Sight(self._lines, observations, lambda line: (begun if dones[line] else infos)[line].get(MASK))
        return Outcome(
            seen, rewards, dones & ~truncated, truncated, lambda line: infos[line]["terminal_observation"], None
        )

    def close(self) -> None:
        """End all environments."""
        self._env.close()


class EnvPoolVector:
    """An EnvPool in its synchronous mode, where some environments can be reset alone; made anew for each `reset`.

    Its seeds are given when it is made, so that is how the same episodes can be played again.
    """

    def __init__(self, maker: EnvMaker, size: int) -> None:
        self._maker, self.size = maker, size
        self._pool = maker.pool([0])  # for its spaces
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self._lines = np.arange(size)
        if self._pool.config["max_num_players"] != 1:
            raise UsageError(f"{maker.name} has several players, and a policy here plays for one.")

    def reset(self, seeds: Sequence[int]) -> Sight:
        """Begin an episode in each environment, from its own seed."""
        self._pool = self._maker.pool(seeds)
        return self._begun(self._lines)

    def _begun(self, lines: np.ndarray) -> Sight:
        observations, infos = self._pool.reset(lines.astype(np.int32))
        return Sight(lines, observations, lambda k: _mask_in(infos, k))

    def send(self, actions: Any) -> None:
        """Set its threads to it."""
        self._pool.send(actions)

    def recv(self) -> Outcome:
        """What they brought."""
        observations, rewards, terminated, truncated, infos = self._pool.recv()
        seen = Sight(self._lines, observations, lambda line: _mask_in(infos, line))
        ended = np.flatnonzero(terminated | truncated)
        firsts = self._begun(ended) if len(ended) else None
        space = self.observation_space
        return Outcome(seen, rewards, terminated, truncated, lambda line: one_of(space, observations, line), firsts)

    def close(self) -> None:
        """End all environments."""
        self._pool.close()
