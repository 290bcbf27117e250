"""Callbacks with the interface of Stable-Baselines3's, whose own classes work too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unidle.sb3.common.base_callbacks import BaseCallback as BaseCallback
from unidle.sb3.common.base_callbacks import CallbackList as CallbackList
from unidle.sb3.common.base_callbacks import ConvertCallback as ConvertCallback
from unidle.sb3.common.base_callbacks import EventCallback as EventCallback
from unidle.sb3.common.evaluation_callbacks import EvalCallback as EvalCallback
from unidle.sb3.common.evaluation_callbacks import StopTrainingOnNoModelImprovement as StopTrainingOnNoModelImprovement
from unidle.sb3.common.evaluation_callbacks import StopTrainingOnRewardThreshold as StopTrainingOnRewardThreshold
from unidle.sb3.theirs import name_of_theirs


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


class LogEveryNTimesteps(EventCallback):
    """Writes what was logged every `n_steps` steps, counted over all environments."""

    def __init__(self, n_steps: int) -> None:
        super().__init__()
        self.n_steps, self._latest = n_steps, 0

    def _on_step(self) -> bool:
        if self.num_timesteps - self._latest >= self.n_steps:
            self._latest = self.num_timesteps
            self.model.dump_logs()
        return True


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
        self.save_freq, self.save_path, self.name_prefix = save_freq, Path(save_path), name_prefix
        self.save_replay_buffer, self.save_vecnormalize = save_replay_buffer, save_vecnormalize

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            path = self.save_path / f"{self.name_prefix}_{self.num_timesteps}_steps.zip"
            self.model.save(path)
            if self.save_replay_buffer and hasattr(self.model, "replay_buffer"):
                name = f"{self.name_prefix}_replay_buffer_{self.num_timesteps}_steps.pkl"
                self.model.save_replay_buffer(self.save_path / name)
            normaliser = self.model.get_vec_normalize_env() if self.save_vecnormalize else None
            if normaliser is not None:
                normaliser.save(str(self.save_path / f"{self.name_prefix}_vecnormalize_{self.num_timesteps}_steps.pkl"))
            if self.verbose:
                print(f"Saved {path}.")
        return True


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


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
