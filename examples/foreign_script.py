"""A training script that knows nothing of unidle: REINFORCE in plain PyTorch, with an environment that wastes time.

`unidle watch -- python foreign_script.py` runs it unchanged and names the function in which the time goes.
"""

import sys
import time

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical


class Rendered(gymnasium.Wrapper):
    """CartPole that waits for a slow renderer in every step."""

    def step(self, action):
        self.wait_for_renderer()
        return self.env.step(action)

    def wait_for_renderer(self):
        time.sleep(0.002)


def play(env, policy):
    """The log-probabilities and rewards of one episode."""
    observation, _ = env.reset()
    log_probs, rewards, is_over = [], [], False
    while not is_over:
        choice = Categorical(logits=policy(torch.as_tensor(observation)))
        action = choice.sample()
        observation, reward, terminated, truncated, _ = env.step(action.item())
        log_probs.append(choice.log_prob(action))
        rewards.append(reward)
        is_over = terminated or truncated
    return torch.stack(log_probs), torch.tensor(rewards)


def main(seconds):
    torch.manual_seed(1)
    env = Rendered(gymnasium.make("CartPole-v1"))
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    episodes, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        log_probs, rewards = play(env, policy)
        returns = rewards.flip(0).cumsum(0).flip(0)
        loss = -(log_probs * (returns - returns.mean())).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        episodes += 1
    print(f"{episodes} episodes; the last one had {len(rewards)} steps")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8)
