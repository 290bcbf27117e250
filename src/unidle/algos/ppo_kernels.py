"""PPO's faster ways on a GPU, each compared with the plain one before anything is learned by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unidle.algos.accumulation import Loss
from unidle.algos.fused_evaluation import FusedEvaluation
from unidle.algos.fused_loss import FusedLoss, has_fused_loss
from unidle.algos.fused_minibatch import FusedMinibatch
from unidle.algos.fused_step import FusedStep
from unidle.algos.ppo import PPO, Batch
from unidle.algos.proof import compare, undone
from unidle.algos.small_network import shape_of
from unidle.memory.fused_gae import fused_gae
from unidle.memory.fused_shuffle import fused_shuffle
from unidle.memory.rollout import Rollout


def proven_ways(algo: PPO, rollout: Rollout) -> dict[str, Any]:
    """The fields of `Ways` that have a kernel for this algorithm; a RuntimeError if one is wrong on this rollout."""
    devices = [algo.sums.device] if algo.sums.is_cuda else []
    # A user's layers may draw and count, as those of dropout and batch normalisation do.
    with torch.random.fork_rng(devices), undone(list(algo.policy.buffers())):
        return _proven_ways(algo, rollout)


def _proven_ways(algo: PPO, rollout: Rollout) -> dict[str, Any]:
    plain, recipe, (steps, n_envs) = algo.ways, algo.recipe, rollout.shape
    n_sequences = steps * n_envs // algo.sequence_length
    order = fused_shuffle(n_sequences, torch.Generator(rollout.rows.device).manual_seed(0))
    if not torch.equal(order.sort().values, torch.arange(n_sequences, device=order.device)):
        raise RuntimeError("the kernel that shuffles leaves something out")
    log_probs, values = plain.evaluate(rollout)
    importance = None
    if recipe.overlap == "strict":
        device = rollout.rewards.device  # and a generator of its own: the run's must stand as they would without this
        importance = 2 * torch.rand(rollout.shape, generator=torch.Generator(device).manual_seed(0), device=device)
    of_rewards = rollout.rewards, values, torch.zeros_like(rollout.rewards), rollout.terminated, rollout.truncated
    targets = plain.gae(*of_rewards, recipe.gamma, recipe.gae_lambda, importance)
    for ours, theirs in zip(fused_gae(*of_rewards, recipe.gamma, recipe.gae_lambda, importance), targets):
        compare("advantages", ours, theirs)
    ways: dict[str, Any] = {"shuffle": fused_shuffle, "gae": fused_gae}
    batch = algo.cut(rollout, log_probs, values, *targets, importance)
    order = order[: algo.orders.shape[1]]
    shape = shape_of(algo.policy)
    if shape is None:
        return {**ways, **_around_network(algo, batch, order)}
    algo.gradient(batch, order)
    expected = algo.parameters.grad.clone()
    evaluation, minibatch = FusedEvaluation(algo.policy, shape), FusedMinibatch(algo, shape)
    for ours, theirs in zip(evaluation.rollout(rollout), (log_probs, values)):
        compare("log-probabilities and values", ours, theirs)
    minibatch.gradient(batch, order)
    compare("gradient", algo.parameters.grad, expected)
    # Adam along the same gradient: where that is close to 0, rounding alone turns a step round.
    plain_step = _moved(algo, lambda: algo.step_along(minibatch.gradient(batch, order)))
    compare("step", _moved(algo, lambda: minibatch.learn(batch, order.unsqueeze(0))), plain_step)
    evaluate, value = evaluation.rollout, lambda rows, states: evaluation.values(rows)
    return {**ways, "evaluate": evaluate, "score": evaluation.score, "value": value, "learn": minibatch.learn}


def _around_network(algo: PPO, batch: Batch, order: Tensor) -> dict[str, Any]:
    """Ways for whatever network: what comes after it, the loss, and what comes after its gradient, the step."""

    def gradient(loss: Callable[[Batch, Tensor, Tensor], Loss]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # so that a network draws the same each time
        logged = algo.pieces.gradient(algo.parameters, len(order), lambda part: loss(batch, order[part], order))[0]
        return algo.parameters.grad.clone(), logged

    ways: dict[str, Any] = {"step": FusedStep(algo)}
    expected, logged = gradient(algo.loss_of)
    ours = _moved(algo, lambda: ways["step"](logged))  # first: the plain one clips the gradient in its place
    compare("step", ours, _moved(algo, lambda: algo.step_along(logged)))
    if has_fused_loss(algo.policy):
        ways["loss"] = FusedLoss(algo)
        for what, ours, theirs in zip(("gradient", "means"), gradient(ways["loss"]), (expected, logged)):
            compare(what, ours, theirs)
    return ways


def _moved(algo: PPO, step: Callable[[], None]) -> Tensor:
    """How `step` changes the parameters, after which all is as it was."""
    flat = algo.parameters.flat.detach()
    with undone([flat, *algo.adam.state_dict().values(), algo.sums, algo.minibatches, algo.stopped]) as before:
        step()
        return flat - before[0]
