"""Callbacks that evaluate the model, and those that stop training by the results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from unidle.errors import UsageError
from unidle.sb3.common.base_callbacks import BaseCallback, EventCallback
from unidle.sb3.common.evaluation import evaluate_policy
from unidle.sb3.common.vec_env import DummyVecEnv
from unidle.sb3.envs import normaliser_of


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
        self.eval_env = DummyVecEnv([lambda: eval_env]) if isinstance(eval_env, gymnasium.Env) else eval_env
        self.n_eval_episodes, self.eval_freq = n_eval_episodes, eval_freq
        self.log_path = None if log_path is None else Path(log_path) / "evaluations.npz"
        self.best_model_save_path = None if best_model_save_path is None else Path(best_model_save_path)
        self.deterministic, self.render = deterministic, render
        self.best_mean_reward = self.last_mean_reward = -np.inf
        self.evaluations_timesteps: list[int] = []
        self.evaluations_results: list[list[float]] = []
        self.evaluations_length: list[list[int]] = []

    def _init_callback(self) -> None:
        super()._init_callback()
        if (self.model.get_vec_normalize_env() is None) != (normaliser_of(self.eval_env) is None):
            raise UsageError(
                "Only one of the training and evaluation environments has a VecNormalize, so that the policy would see "
                "other observations; wrap both."
            )
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
        """Let a `VecNormalize` around the evaluation environments start from the statistics of training."""
        source, target = self.model.get_vec_normalize_env(), normaliser_of(self.eval_env)
        for name in ("obs_rms", "ret_rms"):
            if hasattr(source, name):
                setattr(target, name, copy.deepcopy(getattr(source, name)))

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


def _evaluation_of(callback: BaseCallback) -> Any:
    """The `EvalCallback` that calls `callback`."""
    if callback.parent is None:
        name = type(callback).__name__
        raise UsageError(f"{name} needs the results of an EvalCallback; pass it to one, not to learn().")
    return callback.parent
