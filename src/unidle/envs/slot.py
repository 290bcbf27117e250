"""One environment in its place: it seeds episodes, steps, resets, and writes what happened into the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from unidle.envs.block import Block
from unidle.envs.check import check_mask, check_observation, check_outcome
from unidle.envs.contract import Contract, mask_from
from unidle.envs.make import EnvMaker
from unidle.errors import failure_of

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

    def __init__(self, maker: EnvMaker, index: int, line: int, run_seed: int, contract: Contract, block: Block) -> None:
        self.index, self.line, self.run_seed = index, line, run_seed
        self._contract, self._block = contract, block
        self._write = contract.rows.writer(block.rows)
        self._write_final = contract.rows.writer(block.final_rows)
        self._masks = contract.rows.mask_view(block.rows) if contract.rows.mask_width else None
        self._decode = contract.actions.decode
        self.episode = 0
        self._length = 0
        self._return = 0.0
        self._unchecked = _CHECKED_STEPS
        self.env = self._guarded(maker)

    def start_episode(self, episode: int) -> None:
        """Reset with the seed of that episode and write its first observation."""
        self.episode, self._length, self._return = episode, 0, 0.0
        seed = episode_seed(self.run_seed, self.index, episode)
        observation, info = self._guarded(lambda: check_outcome(self.env.reset(seed=seed), 2, "reset"))
        if self._unchecked:
            self._guarded(lambda: check_observation(self.env.observation_space, observation, "reset"))
        self._observe(observation, info)
        self._block.episode[self.line] = episode

    def step(self) -> None:
        """Take the action in the block; where an episode ends, the next one's first observation follows at once."""
        block, line = self._block, self.line
        try:
            outcome = self.env.step(self._decode(block.actions[line]))
            if self._unchecked:
                check_outcome(outcome, 5, "step")
            observation, reward, terminated, truncated, info = outcome
            if self._unchecked:
                check_observation(self.env.observation_space, observation, "step", reward)
                self._unchecked -= 1
            self._return += float(reward)
        except Exception as error:
            raise self._failure(error) from error
        self._length += 1
        block.reward[line] = reward
        block.terminated[line] = terminated
        # An episode that both ends and runs out of time has ended: nothing is to be expected after it.
        block.truncated[line] = truncated and not terminated
        if terminated or truncated:
            if not terminated:
                self._guarded(lambda: self._write_final(line, observation))
            block.episode_return[line] = self._return
            block.episode_length[line] = self._length
            self.start_episode(self.episode + 1)
        else:
            self._observe(observation, info)

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        try:
            self._write(self.line, observation)
            if self._masks is not None:
                mask = mask_from(observation, info, self._contract.rows.space)
                self._masks[self.line] = check_mask(self._contract.actions, mask)
        except Exception as error:
            raise self._failure(error) from error

    # -- leaving and coming back to an open episode --------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The environment's own state, if it offers one (`state_dict`) and no wrapper keeps a state beside it."""
        if not self._restorable():
            return None
        own = self.env.unwrapped.state_dict()  # type: ignore[attr-defined]
        return {"env": own, "length": self._length, "return": self._return, "episode": self.episode}

    def _restorable(self) -> bool:
        env: gymnasium.Env = self.env
        while isinstance(env, gymnasium.Wrapper):
            if not isinstance(env, (TimeLimit, OrderEnforcing, PassiveEnvChecker)):
                return False
            env = env.env
        return hasattr(env, "state_dict") and hasattr(env, "load_state_dict")

    def resume(self, episode: int, actions: np.ndarray, row: np.ndarray, state: dict[str, Any] | None) -> bool:
        """Bring the open `episode` back to where it was, by its state or by replaying `actions` [k, width].

        False if the observation that comes out is not `row`: the environment is not deterministic. Its episode is then
        started anew.
        """
        self.start_episode(episode)
        if state is not None:
            self._load_state(state)
            self._block.rows[self.line] = row
            return True
        for action in actions:
            self._block.actions[self.line] = action
            self.step()
            if self.episode != episode:
                break
        if self.episode == episode and np.array_equal(self._block.rows[self.line], row):
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
        self._length, self._return, self.episode = state["length"], state["return"], state["episode"]

    # -- errors --------------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        seed = episode_seed(self.run_seed, self.index, self.episode)
        where = f"Environment {self.index} failed in episode {self.episode} (seed {seed}), step {self._length}"
        return failure_of(where, error)
