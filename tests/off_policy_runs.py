"""Environments, policy, collector and algorithm of a small off-policy run."""

from __future__ import annotations

from typing import Any

import torch
from small_runs import CPU, SmallRun

from unidle.algos.capturing import no_capture
from unidle.algos.metrics import Metrics
from unidle.algos.registry import new_algorithm, new_policy
from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.engine.collect.host import HostCollector
from unidle.envs.make import env_maker
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.probe import probe
from unidle.timeline import Timeline

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "net_arch": (16, 16),
    "buffer_size": 256,
    "learning_starts": 32,
    "gamma": 0.5,  # integer rewards and powers of 1/2: every return is exact
}


def off_policy_run(env: Any, algo: str, *, seed: int = 0, **recipe: Any) -> SmallRun:
    """A started run."""
    chosen = recipe_for(algo, **{**SMALL, **recipe})
    maker = env_maker(env)
    env_spec = probe(maker, chosen.discretize)
    torch.manual_seed(seed)
    policy = new_policy(env_spec.obs_layout, env_spec.action_layout, chosen)
    learner = new_algorithm(policy, chosen, no_capture, lambda name, error, to: None)
    rollout = Rollout(
        chosen.n_steps, chosen.n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0, CPU
    )
    envs = SerialEnvs(maker, env_spec, chosen.n_envs, seed)
    collector = HostCollector(envs, policy, [rollout], seed, Timeline())
    collector.start()
    return SmallRun(maker, envs, rollout, collector, learner, seed)  # type: ignore[arg-type]


def keep_autograd(run: SmallRun) -> None:
    """Compute gradients with autograd, as if NumPy did not support them."""
    run.algo._choose_gradients = None


def learn_from(algo: Any, rollout: Rollout, shuffle: torch.Generator, progress: float = 0.0) -> Metrics:
    """Store a rollout, run all updates that are due, and return the metrics."""
    algo.set_progress(progress)
    updates = algo.update_in_parts(rollout, shuffle)
    while True:
        try:
            next(updates)
        except StopIteration as end:
            metrics: Metrics = end.value
            return metrics


def filled_dqn(env: Any, **recipe: Any) -> SmallRun:
    """A run with two rollouts in its replay buffer and no update yet."""
    run = off_policy_run(
        env,
        "dqn",
        **{"gamma": 0.9, "tau": 0.3, "target_update_interval": 1, **recipe},
        learning_starts=10_000,
    )
    for _ in range(2):
        run.collect()
        learn_from(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    with torch.no_grad():  # the target network differs from the start
        flat = run.algo.rule.target_parameters.flat
        flat.add_(0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)))
    return run


def filled_td3(env: Any, **recipe: Any) -> SmallRun:
    """A run with two rollouts in its replay buffer and no update yet; its targets differ from its networks."""
    run = off_policy_run(
        env,
        "td3",
        **{"gamma": 0.9, "learning_rate": 1e-3, "tau": 0.05, **recipe},
        learning_starts=10_000,
    )
    for _ in range(2):
        run.collect()
        learn_from(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for network in (run.algo.rule.target_policy, run.algo.rule.target_critics):
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return run


def filled_sac(env: Any, **recipe: Any) -> SmallRun:
    """A run with two rollouts in its replay buffer and no update yet."""
    run = off_policy_run(
        env,
        "sac",
        **{"gamma": 0.9, "learning_rate": 1e-3, "tau": 0.05, **recipe},
        learning_starts=10_000,
    )
    for _ in range(2):
        run.collect()
        learn_from(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    return run
