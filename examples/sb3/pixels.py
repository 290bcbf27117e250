"""Images: an environment of ours, stacked frames, and a CNN."""

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.sb3 import PPO
from unidle.sb3.common.env_util import make_vec_env
from unidle.sb3.common.vec_env import VecFrameStack


class Catch(gymnasium.Env):
    """A ball falls; the paddle in the last row moves left, stays, or moves right, and should be under it."""

    size = 36

    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (self.size, self.size, 1), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(self.size // 4))
        self.paddle = self.size // 8
        return self._picture(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.size // 4 - 1))
        self.row += 1
        is_over = self.row == self.size // 4 - 1
        reward = float(is_over and self.paddle == self.column)
        return self._picture(), reward, is_over, False, {}

    def _picture(self):
        picture = np.zeros(self.observation_space.shape, np.uint8)
        for row, column in ((self.row, self.column), (self.size // 4 - 1, self.paddle)):
            picture[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 255
        return picture


vec_env = VecFrameStack(make_vec_env(Catch, n_envs=4), n_stack=2)
model = PPO("CnnPolicy", vec_env, n_steps=32, batch_size=64, n_epochs=2, seed=1)
model.learn(total_timesteps=25_000)
observations = vec_env.reset()
actions, _ = model.predict(observations)
print(observations.shape, actions)
