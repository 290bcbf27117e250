"""Builds PPO's Triton kernels for one `PPO`, and verifies each against its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unidle.algos.micro_batches import Loss
from unidle.algos.ppo import PPO, Batch
from unidle.algos.ppo_verification import importance, separate_generator
from unidle.buffers.rollout import Rollout
from unidle.kernels.dispatch import compare
from unidle.kernels.triton import gae, ppo_loss, shuffle
from unidle.kernels.triton.evaluate_rollout import FusedEvaluation
from unidle.kernels.triton.ppo_loss import FusedLoss
from unidle.kernels.triton.ppo_minibatch import FusedMinibatch
from unidle.kernels.triton.ppo_step import FusedStep
from unidle.kernels.triton.small_mlp import SmallMlp
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.describe import describe_small_mlp, small_mlp_tensors
from unidle.nn.optim.adam import FlatAdam
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS

__all__ = ["gae", "shuffle"]

Gae = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Sample:
    """A batch from the first rollout, to verify kernels with."""

    rollout: Rollout
    log_probs: Tensor  # [T, N] by the reference
    values: Tensor  # [T + 1, N]
    batch: Batch
    order: Tensor  # a minibatch


def first_sample(
    ppo: PPO, rollout: Rollout, evaluate: Callable[[Rollout], tuple[Tensor, Tensor]], reference_gae: Gae, size: int
) -> Sample:
    """A batch of `rollout` as the references compute it, and a minibatch of `size` sequences."""
    with torch.no_grad():
        log_probs, values = evaluate(rollout)
        targets = _targets(ppo, rollout, values, reference_gae)
        batch = ppo.cut(rollout, log_probs, values, *targets, importance(ppo, rollout.shape))
    order = torch.randperm(len(batch.obs), generator=separate_generator(ppo), device=rollout.obs.device)
    return Sample(rollout, log_probs, values, batch, order[:size])


def _targets(ppo: PPO, rollout: Rollout, values: Tensor, compute: Gae) -> tuple[Tensor, Tensor]:
    """Advantages and returns by `compute`; the bootstrap value of truncated episodes is 0."""
    ends = torch.zeros_like(rollout.rewards), rollout.terminated, rollout.truncated
    return compute(
        rollout.rewards, values, *ends, ppo.recipe.gamma, ppo.recipe.gae_lambda, importance(ppo, rollout.shape)
    )


# -- whole rollouts ----------------------------------------------------------------------------------------------------


def verify_shuffle(n: int, device: torch.device, permute: Callable[[int, torch.Generator], Tensor]) -> None:
    """RuntimeError unless `permute` gives a permutation of range(n)."""
    order = permute(n, torch.Generator(device).manual_seed(0))
    if not torch.equal(order.sort().values, torch.arange(n, device=order.device)):
        raise RuntimeError("the kernel's order is not a permutation")


def verify_gae(ppo: PPO, rollout: Rollout, reference: Gae, kernel: Gae) -> None:
    """RuntimeError unless both agree on this rollout's rewards."""
    steps, n_envs = rollout.shape
    values = torch.randn(steps + 1, n_envs, generator=separate_generator(ppo), device=rollout.obs.device)
    for ours, theirs in zip(_targets(ppo, rollout, values, kernel), _targets(ppo, rollout, values, reference)):
        compare("advantages", ours, theirs)


def small_mlp_unsupported(policy: ActorCritic) -> str | None:
    """Why the kernels for a small MLP do not support `policy`; None if they do."""
    description = describe_small_mlp(policy)
    return description if isinstance(description, str) else None


def _small_mlp(policy: ActorCritic) -> SmallMlp:
    description = describe_small_mlp(policy)
    assert isinstance(description, SmallMlp)
    return description


class SmallNetwork:
    """Evaluates rollouts with a small MLP, or with a copy of it."""

    def __init__(self, policy: ActorCritic) -> None:
        self._kernel, self._tensors = FusedEvaluation(_small_mlp(policy)), small_mlp_tensors(policy)

    def evaluate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, N] and values [T + 1, N]."""
        return self._kernel.rollout(self._tensors, rollout.obs, rollout.actions)

    def log_probs(self, policy: ActorCritic, rollout: Rollout) -> Tensor:
        """Log-probabilities [T, N] by a copy of the policy."""
        return self._kernel.rollout(small_mlp_tensors(policy), rollout.obs, rollout.actions)[0]

    def values(self, obs: Tensor, states: Tensor) -> Tensor:
        """Values of observations [n, obs_bytes]."""
        return self._kernel.values(self._tensors, obs)


def verify_evaluation(sample: Sample, network: SmallNetwork) -> None:
    """RuntimeError unless `network` evaluates the rollout as the reference does."""
    for ours, theirs in zip(network.evaluate(sample.rollout), (sample.log_probs, sample.values)):
        compare("log-probabilities and values", ours, theirs)


# -- minibatches -------------------------------------------------------------------------------------------------------


def new_minibatch(ppo: PPO) -> FusedMinibatch:
    """The kernel that learns from minibatches, for a small MLP."""
    assert isinstance(ppo.recipe.batch_size, int)
    mlp, tensors = _small_mlp(ppo.policy), small_mlp_tensors(ppo.policy)
    counters, clip_range = ppo.counters, ppo.clip_range
    return FusedMinibatch(mlp, tensors, _adam(ppo), counters, ppo.coefficients, clip_range, ppo.recipe.batch_size)


def _adam(ppo: PPO) -> FlatAdam:
    assert isinstance(ppo.optimiser, FlatAdam)
    return ppo.optimiser


def new_step(ppo: PPO) -> FusedStep:
    """The kernels that clip and step."""
    return FusedStep(_adam(ppo), ppo.counters, ppo.coefficients)


def loss_unsupported(ppo: PPO) -> str | None:
    """Why the kernel does not support this policy's loss; None if it does."""
    distribution = ppo.policy.distribution
    if distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {distribution.name}"
    return ppo_loss.unsupported(distribution.nvec, distribution.reals)


class NetworkLoss:
    """The loss of any network, whose outputs and their gradient are computed with autograd."""

    def __init__(self, ppo: PPO) -> None:
        distribution = ppo.policy.distribution
        self._policy = ppo.policy
        self.kernel = FusedLoss(
            distribution.nvec, distribution.reals, ppo.sequence_length, ppo.clip_range, ppo.coefficients
        )

    def __call__(self, batch: Batch, part: Tensor, whole: Tensor) -> Loss:
        """Loss and metrics of the sequences `part` of the minibatch `whole`."""
        recurrent = (None if field is None else field.index_select(0, part) for field in (batch.starts, batch.states))
        params, values = self._policy(batch.obs.index_select(0, part), *recurrent)
        return Loss(*self.kernel((params.logits, params.mean, params.log_std, values), batch, part, whole))

    def gradients(self, outputs: tuple[Tensor, ...], batch: Batch, order: Tensor) -> list[Tensor]:
        """Loss, metrics, and gradients with respect to the network's outputs for the sequences `order`."""
        logits, mean, log_std, values = outputs
        return self.kernel.launch(logits, mean, log_std, values, batch, order, self.kernel.advantage_norm(batch, order))
