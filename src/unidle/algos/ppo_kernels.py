"""PPO's faster ways on a GPU, each compared with the plain one before anything is learned by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unidle.algos.fused_evaluation import FusedEvaluation
from unidle.algos.fused_loss import FusedLoss, has_fused_loss
from unidle.algos.fused_minibatch import FusedMinibatch
from unidle.algos.fused_step import FusedStep
from unidle.algos.ppo import PPO, Batch
from unidle.buffers.fused_gae import fused_gae
from unidle.buffers.fused_shuffle import fused_shuffle
from unidle.buffers.rollout import Rollout
from unidle.kernels.dispatch import compare, restored
from unidle.kernels.triton.small_mlp import SmallMlp
from unidle.nn.describe import describe_small_mlp
from unidle.spaces.distributions import Params

_EXACTLY = 1e-3  # of a result's length, where both sides come from the same numbers and no products in TF32


def of_rollouts(algo: PPO, rollout: Rollout) -> dict[str, Any]:
    """Ways to shuffle and to compute advantages; a RuntimeError if one is wrong on this rollout."""
    steps, n_envs = rollout.shape
    n_sequences = steps * n_envs // algo.sequence_length
    order = fused_shuffle(n_sequences, torch.Generator(rollout.obs.device).manual_seed(0))
    if not torch.equal(order.sort().values, torch.arange(n_sequences, device=order.device)):
        raise RuntimeError("the kernel that shuffles leaves something out")
    values = torch.randn(steps + 1, n_envs, generator=_generator(algo), device=algo.sums.device)
    for ours, theirs in zip(_targets(algo, rollout, values, fused_gae), _targets(algo, rollout, values, algo.ways.gae)):
        compare("advantages", ours, theirs)
    return {"shuffle": fused_shuffle, "gae": fused_gae}


def of_minibatches(algo: PPO, rollout: Rollout) -> dict[str, Any]:
    """Ways to evaluate and to learn; a RuntimeError if one is wrong on this rollout."""
    devices = [algo.sums.device] if algo.sums.is_cuda else []
    # A user's layers may draw and count, as those of dropout and batch normalisation do.
    with torch.random.fork_rng(devices), restored(list(algo.policy.buffers())):
        evaluated = log_probs, values = algo.ways.evaluate(rollout)
        targets = _targets(algo, rollout, values, algo.ways.gae)
        batch = algo.cut(rollout, log_probs, values, *targets, _importance(algo, rollout))
        order = torch.randperm(len(batch.obs), generator=_generator(algo), device=algo.sums.device)
        order = order[: algo.orders.shape[1]]
        shape = describe_small_mlp(algo.policy)
        if isinstance(shape, str):
            return _around_network(algo, batch, order)
        return _with_network(algo, shape, rollout, evaluated, batch, order)


PROOFS: dict[str, Callable[[PPO, Rollout], dict[str, Any]]] = {
    "for rollouts": of_rollouts,
    "for minibatches": of_minibatches,
}


def _generator(algo: PPO) -> torch.Generator:
    """One of its own: the run's must stand as they would without proofs."""
    return torch.Generator(algo.sums.device).manual_seed(0)


def _importance(algo: PPO, rollout: Rollout) -> Tensor | None:
    if algo.recipe.overlap != "strict":
        return None
    return 2 * torch.rand(rollout.shape, generator=_generator(algo), device=algo.sums.device)


def _targets(
    algo: PPO, rollout: Rollout, values: Tensor, gae: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by `gae`, as if nothing came after an episode that was cut off."""
    of_steps = rollout.rewards, values, torch.zeros_like(rollout.rewards), rollout.terminated, rollout.truncated
    return gae(*of_steps, algo.recipe.gamma, algo.recipe.gae_lambda, _importance(algo, rollout))


def _with_network(
    algo: PPO, shape: SmallMlp, rollout: Rollout, evaluated: tuple[Tensor, Tensor], batch: Batch, order: Tensor
) -> dict[str, Any]:
    """Ways for a small network, which goes through the kernels too."""
    evaluation, minibatch = FusedEvaluation(algo.policy, shape), FusedMinibatch(algo, shape)
    for ours, theirs in zip(evaluation.rollout(rollout), evaluated):
        compare("log-probabilities and values", ours, theirs)
    algo.gradient(batch, order)
    expected = algo.parameters.grad.clone()
    minibatch.gradient(batch, order)
    compare("gradient", algo.parameters.grad, expected)
    # Adam along the same gradient: where that is close to 0, rounding alone turns a step round.
    plain_step = _changes(algo, lambda: algo.step_along(minibatch.gradient(batch, order)))
    for ours, theirs in zip(_changes(algo, lambda: minibatch.learn(batch, order.unsqueeze(0))), plain_step):
        compare("step", ours, theirs)
    evaluate, value = evaluation.rollout, lambda obs, states: evaluation.values(obs)
    return {"evaluate": evaluate, "score": evaluation.score, "value": value, "learn": minibatch.learn}


def _around_network(algo: PPO, batch: Batch, order: Tensor) -> dict[str, Any]:
    """Ways for whatever network: what comes after it, the loss, and what comes after its gradient, the step."""
    step = FusedStep(algo)
    for parameter in algo.policy.parameters():
        if parameter.requires_grad:
            algo.parameters.grad_of(parameter).normal_(generator=_generator(algo))
    logged = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0], device=algo.sums.device)  # 0: the policy has not moved too far
    ours = _changes(algo, lambda: step(logged))  # first: the plain one clips the gradient in its place
    for one, other in zip(ours, _changes(algo, lambda: algo.step_along(logged))):
        compare("step", one, other, _EXACTLY)
    if not has_fused_loss(algo.policy):
        return {"step": step}
    loss = FusedLoss(algo)
    # As after some steps of the optimiser: before them no ratio is clipped.
    batch.log_probs = batch.log_probs + 0.3 * torch.empty_like(batch.log_probs).normal_(generator=_generator(algo))
    minibatch = batch.at(order)
    with torch.no_grad():
        (logits, mean, log_std), values = algo.policy(minibatch.obs, minibatch.starts, minibatch.states)
    given = logits, mean, log_std, values = [
        tensor.detach().contiguous().requires_grad_() for tensor in (logits, mean, log_std, values)
    ]
    plain = algo.loss_from(Params(logits, mean, log_std), values, minibatch, minibatch.advantages)
    slopes = torch.autograd.grad(plain.loss, given, materialize_grads=True)
    norm = loss.advantage_norm(batch, order)
    with torch.no_grad():
        value, means, *our_slopes = loss.launch(logits, mean, log_std, values, batch, order, norm)
    names = ("loss", "logits' slopes", "means' slopes", "deviations' slopes", "values' slopes")
    for name, one, other in zip(names, (value, *our_slopes), (plain.loss, *slopes)):
        compare(name, one, other, _EXACTLY)
    for one, other in zip(means, plain.means):
        compare("terms", one, other, _EXACTLY)
    return {"loss": loss, "step": step}


def _changes(algo: PPO, step: Callable[[], None]) -> list[Tensor]:
    """How `step` changes the parameters, and what it counts, after which all is as it was."""
    flat, counted = algo.parameters.flat.detach(), [algo.sums, algo.minibatches, algo.stopped]
    with restored([flat, *algo.adam.state_dict().values(), *counted]) as before:
        step()
        return [flat - before[0], *(tensor.clone() for tensor in counted)]
