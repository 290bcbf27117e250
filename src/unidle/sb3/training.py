"""What happens around an iteration of `learn`: callbacks, the logger, and the model's view of the run."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.config.settings import OffPolicyRecipe
from unidle.engine.callbacks import CallbackContext, Callbacks
from unidle.engine.iteration_log import is_due
from unidle.errors import UsageError
from unidle.sb3.common.callbacks import CallbackList, ConvertCallback
from unidle.sb3.logger import sb3_metrics
from unidle.sb3.steps import Step, steps_of
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

if TYPE_CHECKING:
    from unidle.sb3.model import Model


def latest_episodes(size: int) -> deque[dict[str, Any]]:
    """Empty: for the latest episodes (r, l and t) while `learn` has a callback."""
    return deque(maxlen=size)


def as_callback(callback: Any) -> Any:
    """One callback for what `learn` accepts: None, a callback, a list of them, or a function."""
    if callback is None or hasattr(callback, "on_step"):
        return callback
    if isinstance(callback, list | tuple):
        return CallbackList([as_callback(each) for each in callback])
    if callable(callback):
        return ConvertCallback(callback)
    raise UsageError(f"`callback` is {callback!r}; pass a BaseCallback, a list of them, or a function.")


class Training:
    """The callbacks of one `learn`, called by the trainer."""

    def __init__(
        self, model: Model, callback: Any, arguments: dict[str, Any], initial: dict[str, Any] | None = None
    ) -> None:
        """`arguments` are those of `learn`, which callbacks see in `locals`; `initial` is the state to continue from.

        `initial` is emptied once the trainer has restored it: a replay buffer in it would take memory during the run.
        """
        self._model, self._callback, self._arguments, self._initial = model, callback, arguments, initial
        self._returns, self._lengths = np.zeros(model.n_envs), np.zeros(model.n_envs, np.int64)  # of open episodes
        self._began = time.time()
        self._has_started = False  # the callback has
        self._logged = 0  # iterations or episodes until the latest record in a logger that was set
        self._is_off_policy = isinstance(model.config.recipe, OffPolicyRecipe)
        self._layouts: tuple[ObservationLayout, ActionLayout] | None = None

    def callbacks(self) -> Callbacks:
        """For the trainer."""
        return Callbacks([self._on_start], [self._after_iteration], [], [self._on_end])

    def _on_start(self, context: CallbackContext) -> None:
        self._model.attach(context)
        state = self._model.save_state()
        for env, rewards in enumerate(state["collector"].get("rewards", ())):
            self._returns[env], self._lengths[env] = float(rewards.sum()), len(rewards)
        if self._initial is not None:
            has_replay_buffer = "experience" in self._initial["algo"]
            self._initial.clear()
            if has_replay_buffer:
                gc.collect()  # the previous run's trainer, which refers to itself
        if self._callback is not None:
            self._callback.init_callback(self._model)
            self._callback.on_training_start({"self": self._model, **self._arguments}, {})
            self._has_started = True
        self._log({})

    def _after_iteration(self, context: CallbackContext) -> None:
        before = self._model.num_timesteps
        self._model.attach(context)
        if self._callback is not None and not self._call(context, before):
            context.stop()
        self._log(context.record)

    def _on_end(self, context: CallbackContext) -> None:
        self._model.attach(context)
        self._model.save_state()  # first: the callback may raise
        if self._has_started:
            self._callback.on_training_end()
        self._log({})

    def _log(self, record: Mapping[str, Any]) -> None:
        """Write what was logged; to a logger that was set, with the metrics, every `log_interval` iterations.

        For off-policy algorithms, that counts episodes.
        """
        if not self._model.has_own_logger:
            self._model.logger.dump()
            return
        interval = self._arguments["log_interval"]
        if not record or interval is None:
            return
        before, self._logged = self._logged, record["rollout/episodes" if self._is_off_policy else "iteration"]
        if is_due(before, self._logged, interval):
            for name, value in sb3_metrics(record).items():
                self._model.logger.record(name, value)
            self._model.logger.dump(record["step"])

    def _call(self, context: CallbackContext, before: int) -> bool:
        """Call the callback for every step of the iteration; False if one asked to stop."""
        callback, model, rollout = self._callback, self._model, context.rollout
        callback.on_rollout_start()
        goes_on = True
        if rollout is None:  # the device ran several iterations
            goes_on = callback.on_step()
        else:
            for step, arrays in enumerate(self._steps(rollout, context.policy)):
                model.num_timesteps = before + (step + 1) * model.n_envs
                callback.update_locals(self._locals(*arrays))
                if not callback.on_step():
                    goes_on = False
                    break
        model.num_timesteps = context.record["step"]
        callback.on_rollout_end()
        return goes_on

    def _steps(self, rollout: Rollout, policy: AnyPolicy) -> Iterator[Step]:
        if self._layouts is None:
            self._layouts = self._model.agent.obs_layout, self._model.agent.action_layout
        return steps_of(rollout, policy, *self._layouts)

    def _locals(
        self, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, actions: Any, new_obs: Any
    ) -> dict[str, Any]:
        dones = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in dones]
        for index in np.flatnonzero(dones):
            episode = {"r": float(self._returns[index]), "l": int(self._lengths[index]), "t": time.time() - self._began}
            self._model.ep_info_buffer.append(episode)
            infos[index] = {"episode": episode, "TimeLimit.truncated": bool(truncated[index])}
        self._returns[dones], self._lengths[dones] = 0.0, 0
        return {"rewards": rewards, "dones": dones, "infos": infos, "actions": actions, "new_obs": new_obs}
