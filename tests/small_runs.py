"""The real parts of a run (environments, policy, rollout, collector, PPO), small enough for a test."""

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
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import probe
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
        """The next rollout, in place."""
        while self.collector.schedule.newest < self.collector.schedule.oldest + self.collector.n_slots - 1:
            self.collector.open_rollout()
        self.rollout = self.collector.finish().rollout
        self.iteration += 1
        return self.rollout

    def learn(self, progress: float = 0.0) -> dict[str, float]:
        """One update from the rollout as it stands."""
        metrics = self.algo.update(self.rollout, progress, self.shuffle())
        return {name: float(value) for name, value in metrics.items()}

    def shuffle(self) -> torch.Generator:
        """The stream that orders this iteration's minibatches; the same one each time it is asked for."""
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
    """A started run; `recipe` holds the settings that are not the defaults below."""
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


def frozen(state: Any) -> Any:
    """A copy of `state` by way of a file, as a checkpoint makes it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def twin(run: SmallRun) -> PPO:
    """A second learner that stands exactly where the first one does: what it prepares leaves the first alone."""
    env_spec = run.envs.env_spec
    other = new_ppo(ActorCritic(env_spec.obs_layout, env_spec.action_layout, run.algo.recipe), run.algo.recipe)
    other.load_state_dict(frozen(run.algo.state_dict()))
    return other


def floats(obs: Tensor, n: int) -> Tensor:
    """The observation of n floats that rows [.., obs_bytes] of such a space begin with."""
    return obs[..., : 4 * n].contiguous().view(torch.float32)


def as_sequences(table: Tensor, length: int) -> Tensor:
    """[T, N, ..] → [T / L · N, L, ..], one sequence at a time."""
    steps, n_envs = table.shape[:2]
    return torch.stack([table[t : t + length, env] for t in range(0, steps, length) for env in range(n_envs)])


def record_acting(run: SmallRun) -> list[tuple[Tensor, Tensor | None]]:
    """Log-probabilities and recurrent states from now on, as they are while acting: a list that collecting extends."""
    notes: list[tuple[Tensor, Tensor | None]] = []
    policy = run.policy
    act, sample = policy.act, policy.distribution.sample
    states: list[Tensor | None] = []

    def noting_act(obs: Tensor, state: Tensor | None = None) -> Any:
        params, after = act(obs, state)
        states.append(None if after is None else after.clone())
        return params, after

    def noting_sample(params: Any, noise: Tensor) -> Tensor:
        action = sample(params, noise)
        log_prob, _ = policy.distribution.score(params, action)
        notes.append((log_prob, states[-1]))
        return action

    policy.act = noting_act
    policy.distribution.sample = noting_sample
    inference = run.collector._slots[0].inference
    inference._is_verified = True  # what verification computes is not acted on
    small = inference._numpy_actor
    if small is not None:  # it acts in NumPy, by what the same weights give there
        choose = small._sample

        def noting_choose(given: np.ndarray, noise: np.ndarray) -> np.ndarray:
            action = choose(given, noise)
            logits, mean = torch.from_numpy(given).split((policy.distribution.n_logits, policy.distribution.reals), -1)
            params = Params(logits, mean, policy.log_std)
            notes.append((policy.distribution.score(params, torch.from_numpy(action))[0], None))
            return action

        small._sample = noting_choose  # type: ignore[method-assign]
    return notes
