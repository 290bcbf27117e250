"""One environment: seeds its episodes, steps and resets it, and writes the results to the block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from unidle.envs.carried_state import carried_state, has_state_dict, layers, load_carried_state, stateful_wrappers
from unidle.envs.check import check_mask, check_observation, check_return_value, layout_check
from unidle.envs.make import EnvMaker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.shared_block import FAILED, SUCCEEDED, SharedBlock
from unidle.envs.spec import EnvSpec, mask_from
from unidle.errors import USER_EXCEPTIONS, TrainingError, as_training_error

_CHECKED_STEPS = 8  # of each environment; later steps are checked by `layout_check`, and for NaN and infinity
_Result = TypeVar("_Result")


def episode_seed(run_seed: int, env: int, episode: int) -> int:
    """The seed of one episode: a hash of run seed, environment and episode, so that any episode can be replayed."""
    word = 0
    for part in (run_seed, env, episode):  # splitmix64
        word = (word + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        word ^= word >> 31
    return word & 0x7FFFFFFF


class EnvSlot:
    """Environment `index` of a run, at `env_id` of the block."""

    def __init__(
        self, maker: EnvMaker, index: int, env_id: int, run_seed: int, env_spec: EnvSpec, block: SharedBlock
    ) -> None:
        """The environment is created when its first episode starts, or earlier by `make`."""
        self.env: gymnasium.Env | None = None
        self._failure_reason = f"Environment {index} has not been started."
        self._maker = maker
        self.index, self.env_id, self.run_seed = index, env_id, run_seed
        self._env_spec, self._block = env_spec, block
        self._check_layout = layout_check(env_spec.obs_layout)
        self._write = env_spec.obs_layout.writer(block.obs)
        self._write_final = env_spec.obs_layout.writer(block.final_obs)
        self._masks = env_spec.obs_layout.mask_view(block.obs) if env_spec.obs_layout.mask_width else None
        self._final_masks = env_spec.obs_layout.mask_view(block.final_obs) if env_spec.obs_layout.mask_width else None
        self._decode = env_spec.action_layout.decoder()
        self.episode = 0
        self.length = 0  # steps of the open episode
        self._return = 0.0
        self._success = 0  # of the open episode, as in `block.episode_success`
        self._unchecked = _CHECKED_STEPS
        self._stateful_wrappers: list[gymnasium.Wrapper] = []  # wrappers with state that survives an episode
        self._carried: dict[int, list[dict[str, Any]]] = {}  # episode → their state when it began

    def make(self) -> gymnasium.Env:
        """Return the environment; create it if there is none."""
        if self.env is None:
            env = self.env = self._guarded(self._maker.of_env(self.index))
            self._stateful_wrappers = self._guarded(lambda: stateful_wrappers(env))
            self._heartbeat()
        return self.env

    def close(self) -> None:
        """Close the environment, if there is one."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def restart(self) -> None:
        """Create the failed environment again and start the next episode."""
        self.mark_failed("")
        self.start_episode(self.episode + 1)

    def mark_failed(self, reason: str) -> None:
        """Close the environment; the next `step` fails with `reason`."""
        self._failure_reason = reason
        with contextlib.suppress(*USER_EXCEPTIONS):  # it is broken and may not close
            self.close()

    def skip_checks(self) -> None:
        """Skip the full checks: these environments were checked before, in another process."""
        self._unchecked = 0

    def start_episode(self, episode: int) -> None:
        """Reset with the seed of that episode and write its first observation."""
        self.episode, self.length, self._return, self._success = episode, 0, 0.0, 0
        env, seed = self.make(), episode_seed(self.run_seed, self.index, episode)
        if self._stateful_wrappers:
            self._keep_carried_state(episode)
        # A multi-task environment chooses its task by env and episode (see MultiTaskEnv).
        options = {"options": {"env": self.index, "episode": episode}} if _is_multi_task(env) else {}
        observation, info = self._guarded(lambda: check_return_value(env.reset(seed=seed, **options), 2, "reset"))
        if self._unchecked:
            self._guarded(lambda: check_observation(env.observation_space, observation, "reset"))
        self._observe(observation, info)
        self._block.episode[self.env_id] = episode
        self._heartbeat()

    def step(self) -> None:
        """Step with the action in the block; if the episode ends, start the next one."""
        block, env_id, env = self._block, self.env_id, self.env
        if env is None:
            raise TrainingError(self._failure_reason)
        try:
            outcome = env.step(self._decode(block.actions[env_id]))
            if self._unchecked:
                check_return_value(outcome, 5, "step")
            observation, reward, terminated, truncated, info = outcome
            if self._unchecked:
                check_observation(env.observation_space, observation, "step", reward)
                self._unchecked -= 1
            self._return += float(reward)
            if info:
                self._success = max(self._success, _success(info))
            block.reward[env_id] = reward
            block.terminated[env_id] = terminated
            # Termination wins over truncation: there is nothing to bootstrap from.
            block.truncated[env_id] = truncated and not terminated
        except USER_EXCEPTIONS as error:
            raise self._failure(error) from error
        self.length += 1
        if terminated or truncated:
            if not terminated:
                self._guarded(lambda: self._check_layout(observation))
                self._guarded(lambda: self._write_final(env_id, observation))
                self._guarded(lambda: self._write_final_mask(observation, info))
            block.episode_return[env_id] = self._return
            block.episode_length[env_id] = self.length
            block.episode_success[env_id] = self._success
            for column, key in enumerate(self._env_spec.log_info):
                block.episode_info[env_id, column] = _number(info.get(key))
            if self._env_spec.log_info and not block.info_names[env_id, 0]:
                block.write_info_names(env_id, [str(key) for key in info if not math.isnan(_number(info[key]))])
            self.start_episode(self.episode + 1)
        else:
            self._observe(observation, info)

    def _write_final_mask(self, observation: Any, info: dict[str, Any]) -> None:
        """Write the mask of the final observation; all zeros if the environment gives none, which is allowed here."""
        if self._final_masks is None:
            return
        actions, mask = self._env_spec.action_layout, mask_from(observation, info, self._env_spec.obs_layout.space)
        flat = None if mask is None else actions.flatten_mask(mask)
        self._final_masks[self.env_id] = 0 if flat is None or actions.empty_head(flat) is not None else flat

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        try:
            self._check_layout(observation)
            self._write(self.env_id, observation)
            if self._masks is not None:
                mask = mask_from(observation, info, self._env_spec.obs_layout.space)
                self._masks[self.env_id] = check_mask(self._env_spec.action_layout, mask)
        except USER_EXCEPTIONS as error:
            raise self._failure(error) from error

    # -- saving and restoring an open episode --------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of the environment, None if nothing: its episode is then replayed.

        {"env": …}, with `state_dict()` of the environment, if it has one and no wrapper has its own state. Else
        {"carried": …}, if wrappers have state that survives episodes: their state at the start of each recent episode.
        """
        self._heartbeat()
        if self._stateful_wrappers:
            return {"carried": dict(self._carried)}
        if self.env is None or not _is_restorable(self.env):
            return None
        try:
            own = self.env.unwrapped.state_dict()  # type: ignore[attr-defined]
        except USER_EXCEPTIONS:
            return None  # do not fail the checkpoint: the episode can be replayed
        kept = {"length": self.length, "return": self._return, "success": self._success, "episode": self.episode}
        return {"env": own, **kept}

    def _keep_carried_state(self, episode: int) -> None:
        oldest = self._block.oldest_episode[self.env_id]
        self._carried = {number: state for number, state in self._carried.items() if oldest <= number < episode}
        if episode >= oldest:
            self._carried[episode] = self._guarded(lambda: carried_state(self._stateful_wrappers))

    def resume(self, point: OpenEpisode) -> Difference | None:
        """Restore an open episode from its state or by replaying its actions; None if nothing differs.

        If a replay does not end at the same observation, start the next episode. If only a reward differs, continue the
        episode.
        """
        self.skip_checks()  # checked before the checkpoint
        state = point.state or {}
        if "carried" in state:
            self.make()
            self._guarded(lambda: load_carried_state(self._stateful_wrappers, state["carried"]))
        self.start_episode(point.episode)
        if "env" in state:
            self._guarded(lambda: self._load_state(state))
            self._block.obs[self.env_id] = point.obs
            return None
        difference = self._replay(point)
        if self.episode == point.episode and np.array_equal(self._block.obs[self.env_id], point.obs):
            return Difference(difference, is_lost=False) if difference else None
        self.start_episode(point.episode + 1)
        return Difference(difference or f"the observation after step {len(point.actions)} differed", is_lost=True)

    def _replay(self, point: OpenEpisode) -> str | None:
        """Replay the actions; returns the first difference in rewards and length."""
        block, env_id, found = self._block, self.env_id, None
        for number, (action, before) in enumerate(zip(point.actions, point.rewards), 1):
            block.actions[env_id] = action
            self.step()
            self._heartbeat()
            now = block.reward[env_id]
            if found is None and now != before:
                found = f"the reward of step {number} was {before!s} and is {now!s}"
            if self.episode != point.episode:
                return found or f"it ended after {number} of {len(point.actions)} steps"
        return found

    def _load_state(self, state: dict[str, Any]) -> None:
        assert self.env is not None
        for layer in layers(self.env):
            if isinstance(layer, TimeLimit):
                layer._elapsed_steps = state["length"]
        self.env.unwrapped.load_state_dict(state["env"])  # type: ignore[attr-defined]
        self.length, self._return, self.episode = state["length"], state["return"], state["episode"]
        self._success = state.get("success", 0)

    def _heartbeat(self) -> None:
        """Show that the worker makes progress, so that a long replay does not count as a hang."""
        self._block.heartbeats[self.env_id] += 1

    # -- errors --------------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except USER_EXCEPTIONS as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> Exception:
        return as_training_error(f"Environment {self.index} failed in {self.at(self.episode, self.length)}", error)

    def at(self, episode: int, step: int) -> str:
        """Describe a step of an episode."""
        return f"episode {episode} (seed {episode_seed(self.run_seed, self.index, episode)}), step {step}"


def _is_restorable(env: gymnasium.Env) -> bool:
    *wrappers, own = layers(env)
    return has_state_dict(own) and all(
        isinstance(wrapper, (TimeLimit, OrderEnforcing, PassiveEnvChecker)) for wrapper in wrappers
    )


def _success(info: dict[str, Any]) -> int:
    """`info["success"]` or `info["is_success"]` as a value of `block.episode_success`."""
    reported = info.get("success", info.get("is_success"))
    return 0 if reported is None or np.ndim(reported) else SUCCEEDED if reported else FAILED


def _number(value: Any) -> float:
    """A single number, also as an array; NaN for anything else."""
    if not isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return math.nan
    array = np.asarray(value)
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else math.nan


def _is_multi_task(env: gymnasium.Env) -> bool:
    """Whether the environment chooses its task by env index and episode."""
    return bool(getattr(env.unwrapped, "is_multi_task", False))
