"""Read and change weights: a few generations of an evolution strategy around a policy of PPO."""

import gymnasium
import numpy as np
import torch

from unidle.sb3 import PPO
from unidle.sb3.common.evaluation import evaluate_policy

env = gymnasium.make("CartPole-v1")
model = PPO("MlpPolicy", env, n_steps=128, n_epochs=4, seed=1)
model.learn(total_timesteps=15_000)
parameters = model.get_parameters()
generator = torch.Generator().manual_seed(1)
for generation in range(3):
    candidates = []
    for _ in range(4):
        weights = {
            name: value.cpu() + 0.02 * torch.randn(value.shape, generator=generator)
            for name, value in parameters["policy"].items()
        }
        model.set_parameters({**parameters, "policy": weights})
        mean, _ = evaluate_policy(model, env, n_eval_episodes=2, warn=False)
        candidates.append((mean, weights))
    best = max(candidates, key=lambda candidate: candidate[0])
    parameters = {**parameters, "policy": best[1]}
    print(f"generation {generation}: {best[0]:.0f}, mean {np.mean([mean for mean, _ in candidates]):.0f}")
model.set_parameters(parameters)
