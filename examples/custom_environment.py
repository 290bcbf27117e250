"""An environment of your own: any `gymnasium.Env`.

Check it first, in this folder: `unidle check-env custom_environment:Corridor --env-kwargs '{length: 9}'`.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

import unidle


class Corridor(gymnasium.Env):
    """Walk right to the end; the wind sometimes pushes back."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=5):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # creates self.np_random, the source of all chance
        self.at = self.steps = 0
        return self.observation(), {}

    def step(self, action):
        wind = self.np_random.random() < 0.1
        self.at = max(0, self.at + (1 if action and not wind else -1))
        self.steps += 1
        is_there, is_late = self.at >= self.length, self.steps >= 100
        return self.observation(), float(is_there) - 0.01, is_there, is_late, {}

    def observation(self):
        return np.array([min(1, self.at / self.length)], np.float32)


if __name__ == "__main__":
    run = unidle.train(
        Corridor,
        env_kwargs={"length": 9},
        n_envs=16,
        n_steps=64,
        batch_size=256,
        learning_rate=1e-3,
        timesteps=20_000,
    )
    result = run.evaluate(episodes=20)
    print(f"mean return {result.mean_return:.2f} in {result.mean_length:.0f} steps")
    for position in (0.0, 0.5):
        action, _ = run.predict([position])
        print(f"at {position}: go {'right' if action else 'left'}")
