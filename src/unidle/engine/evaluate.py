"""Playing whole episodes with a fixed policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from unidle.algos.algorithm import AnyPolicy
from unidle.envs.host import Fault, HostEnvs
from unidle.streams import keyed_generator

_LONGEST_EPISODE = 100_000  # steps after which an evaluation calls it an episode: one that never ends must not hang it
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


class Stopped(Exception):  # noqa: N818  # not an error: the user asked for it
    """An evaluation was broken off."""


@torch.inference_mode()
def play(
    policy: AnyPolicy,
    envs: HostEnvs,
    episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    on_fault: Callable[[Fault], None] = lambda fault: None,
) -> Evaluation:
    """Play `episodes` episodes, shared out among `envs`: environment i plays its episodes 0, 1, … from their seeds.

    Every environment gets its own number of episodes beforehand: taking whichever end first would favour short ones.
    Raises Stopped if `stop` says so before they are over.
    """
    learning = policy.training
    policy.eval()
    try:
        return _play(policy, envs, episodes, deterministic, seed, stop, on_fault)
    finally:
        policy.train(learning)


def _play(
    policy: AnyPolicy,
    envs: HostEnvs,
    episodes: int,
    deterministic: bool,
    seed: int,
    stop: Callable[[], bool],
    on_fault: Callable[[Fault], None],
) -> Evaluation:
    block, device = envs.block, next(policy.parameters()).device
    slices = range(len(envs.bounds))
    quota = np.full(envs.n_envs, episodes // envs.n_envs)
    quota[: episodes % envs.n_envs] += 1
    results: list[list[tuple[float, int]]] = [[] for _ in range(envs.n_envs)]
    envs.start(np.zeros(envs.n_envs, np.int64))
    state = torch.zeros(envs.n_envs, policy.state_size, device=device)
    generator = keyed_generator(device, seed, 2)
    distribution = policy.distribution
    returns, lengths = np.zeros(envs.n_envs), np.zeros(envs.n_envs, np.int64)  # of the open episodes
    while any(len(done) < n for done, n in zip(results, quota)):
        if stop():
            raise Stopped
        params, after = policy.act(torch.from_numpy(block.rows).to(device), state)
        if deterministic:
            action = distribution.mode(params)
        else:
            action = distribution.sample(params, distribution.noise((envs.n_envs,), generator))
        torch.from_numpy(block.actions).copy_(distribution.to_env(action))
        envs.send(slices)
        envs.recv(len(slices))
        # Those are in a new episode: the step failed, or the worker died after it. The broken episode is no result.
        failed = block.redo | (block.truncated & (block.episode_length < 0))
        for fault in envs.faults:
            on_fault(fault)
        envs.faults.clear()
        ended = (block.terminated | block.truncated) & ~failed
        returns += block.reward
        lengths += 1
        returns[failed], lengths[failed] = 0.0, 0
        for env in np.flatnonzero(ended | (lengths >= _LONGEST_EPISODE)):
            if len(results[env]) < quota[env]:
                # The environment's own sum where it has one: it is in double precision.
                total = block.episode_return[env] if ended[env] else returns[env]
                results[env].append((float(total), int(lengths[env])))
            returns[env], lengths[env] = 0.0, 0
        if after is not None:
            state = after * ~torch.from_numpy(ended | failed).to(device).unsqueeze(-1)
    flat = [result for done in results for result in done]
    return Evaluation([r for r, _ in flat], [n for _, n in flat])
