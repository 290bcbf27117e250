"""PPO on Atari in one loop, as in CleanRL, with inference and learning captured as CUDA graphs, as in LeanRL.

The field's fast reference for `atari.py`: environments and learner alternate, the rollout stays on the GPU, and all
that Python does per step is to step ale-py's vector environment, to copy, and to replay a graph. Without a GPU nothing
is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """The settings of the loop; the others are CleanRL's."""

    n_envs: int
    n_steps: int
    batch_size: int
    n_epochs: int


class Agent(nn.Module):
    """CleanRL's network: the Nature CNN, with a linear actor and a linear critic."""

    def __init__(self, n_actions: int) -> None:
        super().__init__()

        def layer(module: Any, gain: float = 2**0.5) -> nn.Module:
            nn.init.orthogonal_(module.weight, gain)
            nn.init.zeros_(module.bias)
            made: nn.Module = module
            return made

        self.network = nn.Sequential(
            *(layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU()),
            *(layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.actor, self.critic = layer(nn.Linear(512, n_actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Frames [n, 4, 84, 84] of uint8 → log-probabilities [n, actions], values [n]."""
        features = self.network(frames / 255.0)
        return self.actor(features).log_softmax(-1), self.critic(features).squeeze(-1)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, whose tensors stay where they are, as a CUDA graph."""
    if not torch.cuda.is_available():
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def train(env: Any, recipe: Recipe, after_iteration: Callable[[int], bool]) -> None:
    """Train until `after_iteration`, called with the number of steps, returns True. `env` is an AtariVectorEnv."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    steps, n_envs = recipe.n_steps, recipe.n_envs
    agent = Agent(int(env.single_action_space.n)).to(device)
    adam = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5, capturable=on_gpu, fused=on_gpu or None)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    frames = zeros(steps, n_envs, 4, 84, 84, dtype=torch.uint8)
    actions = zeros(steps, n_envs, dtype=torch.long)
    log_probs, values, rewards, dones = (zeros(steps, n_envs) for _ in range(4))
    advantages, returns = zeros(steps, n_envs), zeros(steps, n_envs)
    seen, action = zeros(n_envs, 4, 84, 84, dtype=torch.uint8), zeros(n_envs, dtype=torch.long)
    log_prob, value = zeros(n_envs), zeros(n_envs)
    chosen = zeros(recipe.batch_size, dtype=torch.long)

    @torch.no_grad()
    def infer() -> None:
        logits, found = agent(seen)
        noise = torch.empty_like(logits).exponential_().log().neg()
        torch.argmax(logits + noise, -1, out=action)
        log_prob.copy_(logits.gather(1, action[:, None]).squeeze(1))
        value.copy_(found)

    @torch.no_grad()
    def estimate() -> None:
        following, latest = torch.zeros_like(value), value
        for t in reversed(range(steps)):
            goes_on = 1.0 - dones[t]
            delta = rewards[t] + 0.99 * latest * goes_on - values[t]
            following = delta + 0.99 * 0.95 * goes_on * following
            advantages[t], latest = following, values[t]
        torch.add(advantages, values, out=returns)

    def learn() -> None:
        logits, found = agent(frames.flatten(0, 1)[chosen])
        log_ratio = logits.gather(1, actions.flatten()[chosen, None]).squeeze(1) - log_probs.flatten()[chosen]
        advantage, before = advantages.flatten()[chosen], values.flatten()[chosen]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = log_ratio.exp()
        policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.9, 1.1)).mean()
        clipped = before + (found - before).clamp(-0.1, 0.1)
        target = returns.flatten()[chosen]
        value_loss = 0.5 * torch.max((found - target) ** 2, (clipped - target) ** 2).mean()
        entropy = -(logits.exp() * logits).sum(-1).mean()
        adam.zero_grad(set_to_none=False)
        (policy_loss - 0.01 * entropy + 0.5 * value_loss).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        adam.step()

    pinned = torch.zeros(seen.shape, dtype=torch.uint8, pin_memory=on_gpu)
    observations, _ = env.reset(seed=1)
    pinned.copy_(torch.from_numpy(observations))
    seen.copy_(pinned)
    infer_now, estimate_now, learn_now = captured(infer), captured(estimate), captured(learn)
    done_steps = 0
    while True:
        host_rewards, host_dones = (np.zeros((steps, n_envs), np.float32) for _ in range(2))
        for t in range(steps):
            infer_now()
            for stored, now in ((frames, seen), (actions, action), (log_probs, log_prob), (values, value)):
                stored[t] = now
            observations, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
            host_rewards[t], host_dones[t] = reward, terminated | truncated
            pinned.copy_(torch.from_numpy(observations))
            seen.copy_(pinned, non_blocking=True)
        infer_now()  # the value of the last observation
        rewards.copy_(torch.from_numpy(host_rewards))
        dones.copy_(torch.from_numpy(host_dones))
        estimate_now()
        for _ in range(recipe.n_epochs):
            for part in torch.randperm(steps * n_envs, device=device).split(recipe.batch_size):
                chosen.copy_(part)
                learn_now()
        if on_gpu:
            torch.cuda.synchronize()
        done_steps += steps * n_envs
        if after_iteration(done_steps):
            return
