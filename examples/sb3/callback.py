"""A callback that counts episodes, logs a number of its own, and saves the model when its mean return rises."""

import numpy as np

from unidle.sb3 import PPO
from unidle.sb3.common.callbacks import BaseCallback


class KeepBest(BaseCallback):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.best, self.episodes = path, -np.inf, 0

    def _on_step(self) -> bool:
        self.episodes += int(np.sum(self.locals["dones"]))
        return True

    def _on_rollout_end(self) -> None:
        self.logger.record("custom/episodes", self.episodes)
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        if returns and np.mean(returns) > self.best:
            self.best = float(np.mean(returns))
            self.model.save(self.path)


keep = KeepBest("best.zip")
model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, n_epochs=4, tensorboard_log="runs", seed=1)
model.learn(total_timesteps=40_000, callback=keep, tb_log_name="keep_best")
print(f"{keep.episodes} episodes, best mean return {keep.best:.0f}")
