"""Playing whole episodes with a fixed policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from unidle.engine.collector import HostEnvs, keyed_generator
from unidle.nn.policy import Policy

FIRST_EVALUATION_ENV = 1 << 20  # evaluation environments are numbered from here: their seeds are never training's


@dataclass(frozen=True)
class Evaluation:
    """What came out of some episodes."""

    returns: list[float]
    lengths: list[int]

    @property
    def episodes(self) -> int:
        """How many were played."""
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """Mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def mean_length(self) -> float:
        """Mean number of steps."""
        return float(np.mean(self.lengths))


@torch.inference_mode()
def play(policy: Policy, envs: HostEnvs, episodes: int, *, deterministic: bool = True, seed: int = 0) -> Evaluation:
    """Play `episodes` episodes, shared out among `envs`: environment i plays its episodes 0, 1, … from their seeds.

    Every environment gets its own number of episodes beforehand: taking whichever end first would favour short ones.
    """
    block, device = envs.block, policy.log_std.device
    slices = range(len(envs.bounds))
    quota = np.full(envs.n_envs, episodes // envs.n_envs)
    quota[: episodes % envs.n_envs] += 1
    results: list[list[tuple[float, int]]] = [[] for _ in range(envs.n_envs)]
    envs.start(np.zeros(envs.n_envs, np.int64))
    state = torch.zeros(envs.n_envs, policy.state_size, device=device)
    generator = keyed_generator(device, seed, 2)
    distribution = policy.distribution
    while any(len(done) < n for done, n in zip(results, quota)):
        rows = torch.from_numpy(block.rows).to(device)
        params, after = policy.act(rows, state)
        if deterministic:
            action = distribution.mode(params)
        else:
            uniform = torch.rand(envs.n_envs, distribution.heads, generator=generator, device=device)
            normal = torch.randn(envs.n_envs, distribution.reals, generator=generator, device=device)
            action = distribution.sample(params, torch.cat([uniform, normal], -1))
        torch.from_numpy(block.actions).copy_(distribution.to_env(action))
        envs.send(slices)
        envs.recv(len(slices))
        ended = block.terminated | block.truncated
        for env in np.flatnonzero(ended):
            if len(results[env]) < quota[env]:
                results[env].append((float(block.episode_return[env]), int(block.episode_length[env])))
        if after is not None:
            state = after * ~torch.from_numpy(ended).to(device).unsqueeze(-1)
    flat = [result for done in results for result in done]
    return Evaluation([r for r, _ in flat], [n for _, n in flat])
