"""Observations with several parts."""

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.sb3 import SAC
from unidle.sb3.common.evaluation import evaluate_policy


class Reach(gymnasium.Env):
    """Move a point to a goal."""

    def __init__(self):
        box = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({"position": box, "goal": box, "phase": spaces.Discrete(2)})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.position = np.clip(self.position + 0.2 * action, -1, 1).astype(np.float32)
        self.steps += 1
        distance = float(np.linalg.norm(self.position - self.goal))
        return self._observation(), -distance, distance < 0.1, self.steps >= 25, {}

    def _observation(self):
        return {"position": self.position, "goal": self.goal, "phase": int(self.steps >= 12)}


env = Reach()
model = SAC("MultiInputPolicy", env, learning_starts=100, policy_kwargs={"net_arch": [32, 32]}, seed=1)
model.learn(total_timesteps=20_000)
mean, _ = evaluate_policy(model, env, n_eval_episodes=5, warn=False)
print(f"return {mean:.1f}")
