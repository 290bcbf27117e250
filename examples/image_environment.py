"""An environment with images: a Box of uint8 gets a CNN, and `frame_stack` shows it several frames."""

import gymnasium
import numpy as np
from gymnasium import spaces

import unidle


class Catch(gymnasium.Env):
    """A ball falls through a 12 × 12 image; the paddle should be below it when it lands."""

    observation_space = spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, self.np_random.integers(12), 6
        return self.image(), {}

    def step(self, action):
        self.row += 1
        self.paddle = min(max(self.paddle + int(action) - 1, 0), 11)
        has_landed = self.row == 11
        return self.image(), float(has_landed and self.ball == self.paddle), has_landed, False, {}

    def image(self):
        pixels = np.zeros((12, 12), np.uint8)
        pixels[self.row, self.ball] = pixels[11, self.paddle] = 255
        return pixels


if __name__ == "__main__":
    run = unidle.train(
        Catch,
        frame_stack=2,
        n_envs=16,
        n_steps=33,  # three episodes
        batch_size=132,
        n_epochs=2,
        learning_rate=1e-3,
        timesteps=12_000,
    )
    print(f"caught {run.evaluate(episodes=100).mean_return:.0%}")
