"""One environment in its place: it seeds episodes, steps, resets, and writes what happened into the block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from unidle.envs.block import FAILED, SUCCEEDED, Block
from unidle.envs.check import check_mask, check_observation, check_outcome
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec, mask_from
from unidle.errors import TrainingError, failure_of

_CHECKED_STEPS = 8  # each environment's first steps are checked in full; later ones only by what the learner sees
_Result = TypeVar("_Result")


def episode_seed(run_seed: int, env: int, episode: int) -> int:
    """The seed of one episode: a hash of run, environment and episode, so that any episode can be played again."""
    word = 0
    for part in (run_seed, env, episode):  # splitmix64
        word = (word + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        word ^= word >> 31
    return word & 0x7FFFFFFF


class EnvSlot:
    """Environment number `index` of a run, writing to line `line` of the block."""

    def __init__(self, maker: EnvMaker, index: int, line: int, run_seed: int, env_spec: EnvSpec, block: Block) -> None:
        """The environment itself is made when its first episode is started, or before by `make`."""
        self.env: gymnasium.Env | None = None
        self._why_none = f"Environment {index} has not been started."
        self._maker = maker
        self.index, self.line, self.run_seed = index, line, run_seed
        self._env_spec, self._block = env_spec, block
        self._write = env_spec.obs_layout.writer(block.obs)
        self._write_final = env_spec.obs_layout.writer(block.final_obs)
        self._masks = env_spec.obs_layout.mask_view(block.obs) if env_spec.obs_layout.mask_width else None
        self._final_masks = env_spec.obs_layout.mask_view(block.final_obs) if env_spec.obs_layout.mask_width else None
        self._decode = env_spec.action_layout.decoder()
        self.episode = 0
        self.length = 0  # steps of the open episode
        self._return = 0.0
        self._success = 0  # of the open episode, as the block tells it
        self._unchecked = _CHECKED_STEPS

    def make(self) -> gymnasium.Env:
        """The environment, made if there is none."""
        if self.env is None:
            self.env = self._guarded(self._maker)
            self._beat()
        return self.env

    def close(self) -> None:
        """Close the environment, if there is one."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def renew(self) -> None:
        """The environment has failed: make it again and begin the next episode."""
        self.give_up("")
        self.start_episode(self.episode + 1)

    def give_up(self, why: str) -> None:
        """Go on without an environment; the next `step` fails with `why`."""
        self._why_none = why
        with contextlib.suppress(Exception):  # it is broken, so it may well not close
            self.close()

    def trust(self) -> None:
        """Check no more steps in full: these environments were checked in a worker before this one."""
        self._unchecked = 0

    def start_episode(self, episode: int) -> None:
        """Reset with the seed of that episode and write its first observation."""
        self.episode, self.length, self._return, self._success = episode, 0, 0.0, 0
        env, seed = self.make(), episode_seed(self.run_seed, self.index, episode)
        # What an episode is may depend on more than its seed (see MultiTaskEnv).
        asked = {"options": {"env": self.index, "episode": episode}} if _takes_turns(env) else {}
        observation, info = self._guarded(lambda: check_outcome(env.reset(seed=seed, **asked), 2, "reset"))
        if self._unchecked:
            self._guarded(lambda: check_observation(env.observation_space, observation, "reset"))
        self._observe(observation, info)
        self._block.episode[self.line] = episode
        self._beat()

    def step(self) -> None:
        """Take the action in the block; where an episode ends, the next one's first observation follows at once."""
        block, line, env = self._block, self.line, self.env
        if env is None:
            raise TrainingError(self._why_none)
        try:
            outcome = env.step(self._decode(block.actions[line]))
            if self._unchecked:
                check_outcome(outcome, 5, "step")
            observation, reward, terminated, truncated, info = outcome
            if self._unchecked:
                check_observation(env.observation_space, observation, "step", reward)
                self._unchecked -= 1
            self._return += float(reward)
            if info:
                self._success = max(self._success, _success(info))
            block.reward[line] = reward
            block.terminated[line] = terminated
            # An episode that both ends and runs out of time has ended: nothing is to be expected after it.
            block.truncated[line] = truncated and not terminated
        except Exception as error:
            raise self._failure(error) from error
        self.length += 1
        if terminated or truncated:
            if not terminated:
                self._guarded(lambda: self._write_final(line, observation))
                self._guarded(lambda: self._write_final_mask(observation, info))
            block.episode_return[line] = self._return
            block.episode_length[line] = self.length
            block.episode_success[line] = self._success
            self.start_episode(self.episode + 1)
        else:
            self._observe(observation, info)

    def _write_final_mask(self, observation: Any, info: dict[str, Any]) -> None:
        """What might have been done next; nothing at all if the environment does not say, as it need not here."""
        if self._final_masks is None:
            return
        actions, mask = self._env_spec.action_layout, mask_from(observation, info, self._env_spec.obs_layout.space)
        flat = None if mask is None else actions.flatten_mask(mask)
        self._final_masks[self.line] = 0 if flat is None or actions.empty_head(flat) is not None else flat

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        try:
            self._write(self.line, observation)
            if self._masks is not None:
                mask = mask_from(observation, info, self._env_spec.obs_layout.space)
                self._masks[self.line] = check_mask(self._env_spec.action_layout, mask)
        except Exception as error:
            raise self._failure(error) from error

    # -- leaving and coming back to an open episode --------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The environment's own state, if it offers one (`state_dict`) and no wrapper keeps a state beside it."""
        self._beat()
        if self.env is None or not _is_restorable(self.env):
            return None
        try:
            own = self.env.unwrapped.state_dict()  # type: ignore[attr-defined]
        except Exception:
            return None  # no reason to lose a checkpoint: its episode can be replayed
        kept = {"length": self.length, "return": self._return, "success": self._success, "episode": self.episode}
        return {"env": own, **kept}

    def resume(self, episode: int, actions: np.ndarray, row: np.ndarray, state: dict[str, Any] | None) -> bool:
        """Bring the open `episode` back to where it was, by its state or by replaying `actions` [k, width].

        False if the observation that comes out is not `row`: the environment is not deterministic. Its episode is then
        started anew.
        """
        self.trust()  # what is resumed was checked when it was begun
        self.start_episode(episode)
        if state is not None:
            self._guarded(lambda: self._load_state(state))
            self._block.obs[self.line] = row
            return True
        for action in actions:
            self._block.actions[self.line] = action
            self.step()
            self._beat()
            if self.episode != episode:
                break
        if self.episode == episode and np.array_equal(self._block.obs[self.line], row):
            return True
        self.start_episode(episode + 1)
        return False

    def _load_state(self, state: dict[str, Any]) -> None:
        env: Any = self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, TimeLimit):
                env._elapsed_steps = state["length"]
            env = env.env
        env.load_state_dict(state["env"])
        self.length, self._return, self.episode = state["length"], state["return"], state["episode"]
        self._success = state.get("success", 0)

    def _beat(self) -> None:
        """A sign of life: a long replay is told from one that hangs."""
        self._block.beats[self.line] += 1

    # -- errors --------------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        return failure_of(f"Environment {self.index} failed in {self.at(self.episode, self.length)}", error)

    def at(self, episode: int, step: int) -> str:
        """That step of that episode in words."""
        return f"episode {episode} (seed {episode_seed(self.run_seed, self.index, episode)}), step {step}"


def _is_restorable(env: gymnasium.Env) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if not isinstance(env, (TimeLimit, OrderEnforcing, PassiveEnvChecker)):
            return False
        env = env.env
    return hasattr(env, "state_dict") and hasattr(env, "load_state_dict")


def _success(info: dict[str, Any]) -> int:
    """What a step says of success, as the block tells it."""
    said = info.get("success", info.get("is_success"))
    return 0 if said is None or np.ndim(said) else SUCCEEDED if said else FAILED


def _takes_turns(env: gymnasium.Env) -> bool:
    """Whether the number of an environment and of its episode decide which task it plays."""
    return bool(getattr(env.unwrapped, "takes_turns", False))
