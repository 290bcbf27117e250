"""The real parts of a run (environments, policy, rollout, collector, PPO), numpy_actor enough for a test."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.algos.ppo import PPO
from unidle.algos.ppo_ops import new_ppo
from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.engine.collect.host import HostCollector
from unidle.envs.make import EnvMaker, env_maker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.nn.actor_critic import ActorCritic
from unidle.rng import keyed_generator
from unidle.spaces.distributions import Params
from unidle.timeline import Timeline

CPU = torch.device("cpu")


@dataclass
class SmallRun:
    """A collector and a learner of one policy."""

    maker: EnvMaker
    envs: HostEnvs
    rollout: Rollout
    collector: HostCollector
    algo: PPO
    seed: int
    iteration: int = 0

    @property
    def policy(self) -> ActorCritic:
        return self.algo.policy

    def collect(self) -> Rollout:
        """Collect the next rollout, in place."""
        while self.collector.schedule.newest < self.collector.schedule.oldest + self.collector.n_slots - 1:
            self.collector.open_rollout()
        self.rollout = self.collector.finish().rollout
        self.iteration += 1
        return self.rollout

    def learn(self, progress: float = 0.0) -> dict[str, float]:
        """One update from the current rollout."""
        metrics = self.algo.update(self.rollout, progress, self.shuffle())
        return {name: float(value) for name, value in metrics.items()}

    def shuffle(self) -> torch.Generator:
        """The generator that shuffles this iteration's minibatches, the same on each call."""
        return keyed_generator(CPU, self.seed, 3, self.iteration)


def small_run(
    env: str | Callable[..., Any],
    *,
    seed: int = 0,
    workers: int = 0,
    slices: int = 1,
    kwargs: dict[str, Any] | None = None,
    **recipe: Any,
) -> SmallRun:
    """A started run; `recipe` overrides the default settings below."""
    settings = {
        "n_envs": 2,
        "n_steps": 16,
        "batch_size": 8,
        "n_epochs": 2,
        "net_arch": (16, 16),
        "recurrent_size": 8,
    }
    chosen = recipe_for(**{**settings, **recipe})
    maker = env_maker(env, kwargs)
    env_spec = probe(maker, chosen.discretize)
    torch.manual_seed(seed)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, chosen)
    algo = new_ppo(policy, chosen)
    obs, width = env_spec.obs_layout.obs_bytes, env_spec.action_layout.width
    rollouts = [
        Rollout(chosen.n_steps, chosen.n_envs, obs, width, policy.state_size, CPU)
        for _ in range(2 if chosen.overlap == "strict" else 1)
    ]
    envs: HostEnvs
    if workers:
        envs = ProcessPool(maker, env_spec, chosen.n_envs, seed, workers, slices=slices)
    else:
        envs = SerialEnvs(maker, env_spec, chosen.n_envs, seed)
    collector = HostCollector(envs, policy, rollouts, seed, Timeline())
    collector.start()
    return SmallRun(maker, envs, rollouts[0], collector, algo, seed)


def save_and_load(state: Any) -> Any:
    """`state` saved and loaded, as in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copy_of_learner(run: SmallRun) -> PPO:
    """A second learner with the same state, so that what it computes does not affect the first."""
    env_spec = run.envs.env_spec
    other = new_ppo(ActorCritic(env_spec.obs_layout, env_spec.action_layout, run.algo.recipe), run.algo.recipe)
    other.load_state_dict(save_and_load(run.algo.state_dict()))
    return other


def floats(obs: Tensor, n: int) -> Tensor:
    """The n floats at the start of packed observations [.., obs_bytes]."""
    return obs[..., : 4 * n].contiguous().view(torch.float32)


def as_sequences(table: Tensor, length: int) -> Tensor:
    """[T, N, ..] → [T / L · N, L, ..], one sequence at a time."""
    steps, n_envs = table.shape[:2]
    return torch.stack([table[t : t + length, env] for t in range(0, steps, length) for env in range(n_envs)])


def record_inference(run: SmallRun) -> list[tuple[Tensor, Tensor | None]]:
    """A list that collecting extends with the log-probabilities and recurrent states of inference."""
    recorded: list[tuple[Tensor, Tensor | None]] = []
    policy = run.policy
    act, sample = policy.act, policy.distribution.sample
    states: list[Tensor | None] = []

    def recording_act(obs: Tensor, state: Tensor | None = None) -> Any:
        params, after = act(obs, state)
        states.append(None if after is None else after.clone())
        return params, after

    def recording_sample(params: Any, noise: Tensor) -> Tensor:
        action = sample(params, noise)
        log_prob, _ = policy.distribution.log_prob_and_entropy(params, action)
        recorded.append((log_prob, states[-1]))
        return action

    policy.act = recording_act
    policy.distribution.sample = recording_sample
    inference = run.collector._slots[0].inference
    inference._is_verified = True  # the verification pass would be recorded too
    numpy_actor = inference._numpy_actor
    if numpy_actor is not None:  # the CPU's NumPy implementation
        numpy_sample = numpy_actor._sample

        def recording_numpy_sample(given: np.ndarray, noise: np.ndarray) -> np.ndarray:
            action = numpy_sample(given, noise)
            logits, mean = torch.from_numpy(given).split((policy.distribution.n_logits, policy.distribution.reals), -1)
            params = Params(logits, mean, policy.log_std)
            recorded.append((policy.distribution.log_prob_and_entropy(params, torch.from_numpy(action))[0], None))
            return action

        numpy_actor._sample = recording_numpy_sample  # type: ignore[method-assign]
    return recorded
