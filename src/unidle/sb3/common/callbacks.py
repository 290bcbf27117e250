"""Callbacks with the interface of Stable-Baselines3's, whose own classes work too.

A model calls `on_step` for every step of the environments, but not while they step: once an iteration is complete, for
all of its steps one after the other. `locals` has the `rewards`, `dones` and `infos` of the step; the model is as the
iteration left it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unidle.errors import UsageError
from unidle.sb3.common.evaluation import evaluate_policy


class BaseCallback(ABC):
    """Override `_on_step`, which ends training by returning False, and any of the other methods with an underscore."""

    model: Any
    parent: Any = None

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.n_calls = self.num_timesteps = 0
        self.locals: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}

    @property
    def training_env(self) -> Any:
        """The model's environments."""
        return self.model.get_env()

    @property
    def logger(self) -> Any:
        """The model's logger."""
        return self.model.logger

    def init_callback(self, model: Any) -> None:
        """Called by the model before training."""
        self.model = model
        self._init_callback()

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        """Called when training starts."""
        self.locals, self.globals = locals_, globals_
        self.num_timesteps = self.model.num_timesteps
        self._on_training_start()

    def on_rollout_start(self) -> None:
        """Called before the steps of an iteration."""
        self._on_rollout_start()

    def on_step(self) -> bool:
        """Called for a step of all environments; False ends training."""
        self.n_calls += 1
        self.num_timesteps = self.model.num_timesteps
        return self._on_step()

    def on_rollout_end(self) -> None:
        """Called after the steps of an iteration."""
        self._on_rollout_end()

    def on_training_end(self) -> None:
        """Called when training ends."""
        self._on_training_end()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        """Called before `on_step` with what happened in the step."""
        self.locals.update(locals_)
        self.update_child_locals(locals_)

    def update_child_locals(self, locals_: dict[str, Any]) -> None:  # noqa: B027
        """Pass `locals_` on to callbacks that this one calls."""

    def _init_callback(self) -> None:  # noqa: B027
        """`self.model` is set."""

    def _on_training_start(self) -> None:  # noqa: B027
        """Training starts."""

    def _on_rollout_start(self) -> None:  # noqa: B027
        """An iteration starts."""

    @abstractmethod
    def _on_step(self) -> bool:
        """A step of all environments; False ends training."""

    def _on_rollout_end(self) -> None:  # noqa: B027
        """An iteration is over."""

    def _on_training_end(self) -> None:  # noqa: B027
        """Training is over."""


class CallbackList(BaseCallback):
    """Several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self.callbacks = list(callbacks)

    def _init_callback(self) -> None:
        for callback in self.callbacks:
            callback.init_callback(self.model)
            callback.parent = self.parent

    def _on_training_start(self) -> None:
        for callback in self.callbacks:
            callback.on_training_start(self.locals, self.globals)

    def _on_rollout_start(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_start()

    def _on_step(self) -> bool:
        go_on = [callback.on_step() for callback in self.callbacks]  # call all of them
        return all(go_on)

    def _on_rollout_end(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end()

    def _on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()

    def update_child_locals(self, locals_: dict[str, Any]) -> None:
        """Pass them to all callbacks."""
        for callback in self.callbacks:
            callback.update_locals(locals_)


class ConvertCallback(BaseCallback):
    """A function of `locals` and `globals`; False ends training."""

    def __init__(self, callback: Callable[[dict[str, Any], dict[str, Any]], Any], verbose: int = 0) -> None:
        super().__init__(verbose)
        self._function = callback

    def _on_step(self) -> bool:
        return self._function(self.locals, self.globals) is not False


class EventCallback(BaseCallback):
    """Calls another callback when something happens."""

    def __init__(self, callback: Any = None, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.callback = callback
        if callback is not None:
            callback.parent = self

    def _init_callback(self) -> None:
        if self.callback is not None:
            self.callback.init_callback(self.model)

    def _on_training_start(self) -> None:
        if self.callback is not None:
            self.callback.on_training_start(self.locals, self.globals)

    def _on_step(self) -> bool:
        return True

    def _on_event(self) -> bool:
        return True if self.callback is None else bool(self.callback.on_step())

    def update_child_locals(self, locals_: dict[str, Any]) -> None:
        """Pass them to the callback."""
        if self.callback is not None:
            self.callback.update_locals(locals_)


class EveryNTimesteps(EventCallback):
    """Calls a callback every `n_steps` steps, counted over all environments."""

    def __init__(self, n_steps: int, callback: Any) -> None:
        super().__init__(callback)
        self.n_steps, self._latest = n_steps, 0

    def _on_step(self) -> bool:
        if self.num_timesteps - self._latest < self.n_steps:
            return True
        self._latest = self.num_timesteps
        return self._on_event()


class CheckpointCallback(BaseCallback):
    """Saves the model every `save_freq` calls, as <save_path>/<name_prefix>_<timesteps>_steps.zip."""

    def __init__(
        self,
        save_freq: int,
        save_path: str,
        name_prefix: str = "rl_model",
        save_replay_buffer: bool = False,
        save_vecnormalize: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if save_replay_buffer:
            raise UsageError(
                "unidle.sb3 does not save replay buffers on their own; leave out save_replay_buffer, and pass "
                "tensorboard_log to the model, whose run folder can be resumed with unidle.resume."
            )
        self.save_freq, self.save_path, self.name_prefix = save_freq, Path(save_path), name_prefix
        self.save_vecnormalize = save_vecnormalize

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            path = self.save_path / f"{self.name_prefix}_{self.num_timesteps}_steps.zip"
            self.model.save(path)
            normaliser = self.model.get_vec_normalize_env() if self.save_vecnormalize else None
            if normaliser is not None:
                normaliser.save(str(self.save_path / f"{self.name_prefix}_vecnormalize_{self.num_timesteps}_steps.pkl"))
            if self.verbose:
                print(f"Saved {path}.")
        return True


class EvalCallback(EventCallback):
    """Evaluates the model every `eval_freq` calls, and keeps the best one as <best_model_save_path>/best_model.zip."""

    def __init__(
        self,
        eval_env: Any,
        callback_on_new_best: Any = None,
        callback_after_eval: Any = None,
        n_eval_episodes: int = 5,
        eval_freq: int = 10_000,
        log_path: str | None = None,
        best_model_save_path: str | None = None,
        deterministic: bool = True,
        render: bool = False,
        verbose: int = 1,
        warn: bool = True,
    ) -> None:
        super().__init__(callback_after_eval, verbose)
        self.callback_on_new_best = callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self.eval_env, self.n_eval_episodes, self.eval_freq = eval_env, n_eval_episodes, eval_freq
        self.log_path = None if log_path is None else Path(log_path) / "evaluations.npz"
        self.best_model_save_path = None if best_model_save_path is None else Path(best_model_save_path)
        self.deterministic, self.render = deterministic, render
        self.best_mean_reward = self.last_mean_reward = -np.inf
        self.evaluations_timesteps: list[int] = []
        self.evaluations_results: list[list[float]] = []
        self.evaluations_length: list[list[int]] = []

    def _init_callback(self) -> None:
        super()._init_callback()
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(self.model)

    def _on_step(self) -> bool:
        if self.eval_freq <= 0 or self.n_calls % self.eval_freq:
            return True
        self._copy_statistics()
        returns, lengths = evaluate_policy(
            self.model,
            self.eval_env,
            self.n_eval_episodes,
            self.deterministic,
            self.render,
            return_episode_rewards=True,
        )
        mean, length = float(np.mean(returns)), float(np.mean(lengths))
        self.last_mean_reward = mean
        self._save_results(returns, lengths)
        self.logger.record("eval/mean_reward", mean)
        self.logger.record("eval/mean_ep_length", length)
        if self.verbose:
            print(f"Step {self.num_timesteps:,}: mean return {mean:.2f} ± {np.std(returns):.2f}, length {length:.1f}.")
        goes_on = True
        if mean > self.best_mean_reward:
            self.best_mean_reward = mean
            if self.best_model_save_path is not None:
                self.model.save(self.best_model_save_path / "best_model")
            if self.callback_on_new_best is not None:
                goes_on = bool(self.callback_on_new_best.on_step())
        return self._on_event() and goes_on

    def _copy_statistics(self) -> None:
        """Let a `VecNormalize` around the evaluation environments use the statistics of training."""
        source = self.model.get_vec_normalize_env()
        target = self.eval_env
        while target is not None and type(target).__name__ != "VecNormalize":
            target = vars(target).get("venv")
        if source is not None and target is not None:
            target.obs_rms, target.ret_rms = source.obs_rms, source.ret_rms

    def _save_results(self, returns: list[float], lengths: list[int]) -> None:
        self.evaluations_timesteps.append(self.num_timesteps)
        self.evaluations_results.append(returns)
        self.evaluations_length.append(lengths)
        if self.log_path is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                self.log_path,
                timesteps=self.evaluations_timesteps,
                results=self.evaluations_results,
                ep_lengths=self.evaluations_length,
            )


class StopTrainingOnRewardThreshold(BaseCallback):
    """Stops once the best mean return of an `EvalCallback` reaches `reward_threshold`; its `callback_on_new_best`."""

    def __init__(self, reward_threshold: float, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.reward_threshold = reward_threshold

    def _on_step(self) -> bool:
        return bool(_evaluation_of(self).best_mean_reward < self.reward_threshold)


class StopTrainingOnNoModelImprovement(BaseCallback):
    """Stops after more than `max_no_improvement_evals` evaluations without a new best; its `callback_after_eval`."""

    def __init__(self, max_no_improvement_evals: int, min_evals: int = 0, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.max_no_improvement_evals, self.min_evals = max_no_improvement_evals, min_evals
        self._best, self._without = -np.inf, 0

    def _on_step(self) -> bool:
        best = _evaluation_of(self).best_mean_reward
        if self.n_calls > self.min_evals:
            self._without = 0 if best > self._best else self._without + 1
        self._best = best
        return self._without <= self.max_no_improvement_evals


class StopTrainingOnMaxEpisodes(BaseCallback):
    """Stops after `max_episodes` episodes per environment."""

    def __init__(self, max_episodes: int, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.max_episodes, self.n_episodes = max_episodes, 0

    def _on_step(self) -> bool:
        self.n_episodes += int(np.sum(self.locals["dones"]))
        return self.n_episodes < self.max_episodes * self.model.n_envs


class ProgressBarCallback(BaseCallback):
    """Shows how far training is, as `learn(progress_bar=True)` does."""

    def _on_training_start(self) -> None:
        from rich.progress import Progress

        self._bar = Progress()
        self._task = self._bar.add_task("Training", total=self.locals["total_timesteps"], completed=self.num_timesteps)
        self._bar.start()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._bar.update(self._task, completed=self.num_timesteps)

    def _on_training_end(self) -> None:
        self._bar.stop()


def _evaluation_of(callback: BaseCallback) -> Any:
    """The `EvalCallback` that calls `callback`."""
    if callback.parent is None:
        name = type(callback).__name__
        raise UsageError(f"{name} needs the results of an EvalCallback; pass it to one, not to learn().")
    return callback.parent
