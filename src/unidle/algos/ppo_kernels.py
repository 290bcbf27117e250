"""PPO's faster ways on a GPU, each compared with the plain one before anything is learned by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unidle.algos.fused_evaluation import FusedEvaluation
from unidle.algos.fused_minibatch import FusedMinibatch
from unidle.algos.ppo import PPO, Batch
from unidle.algos.proof import compare, undone
from unidle.algos.small_network import shape_of
from unidle.memory.fused_gae import fused_gae
from unidle.memory.fused_shuffle import fused_shuffle
from unidle.memory.rollout import Rollout


def proven_ways(algo: PPO, rollout: Rollout) -> dict[str, Any]:
    """The fields of `Ways` that have a kernel for this algorithm; a RuntimeError if one is wrong on this rollout."""
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
    shape = shape_of(algo.policy)
    if shape is None:
        return ways
    evaluation, minibatch = FusedEvaluation(algo.policy, shape), FusedMinibatch(algo, shape)
    for ours, theirs in zip(evaluation.rollout(rollout), (log_probs, values)):
        compare("log-probabilities and values", ours, theirs)
    fields = (rollout.rows[:-1], rollout.actions, log_probs, values[:-1], *targets)
    columns = [field.reshape(steps * n_envs, 1, *field.shape[2:]) for field in fields]
    batch = Batch(*columns, None, None, None)  # type: ignore[call-arg]
    order = order[: recipe.batch_size]
    if importance is not None:
        batch.weights = importance.reshape(batch.log_probs.shape)
    algo.gradient(batch, order)
    expected = algo.parameters.grad.clone()
    minibatch.gradient(batch, order)
    compare("gradient", algo.parameters.grad, expected)
    # Adam along the same gradient: where that is close to 0, rounding alone turns a step round.
    plain_step = _moved(algo, lambda: algo.step_along(minibatch.gradient(batch, order)))
    compare("step", _moved(algo, lambda: minibatch.learn(batch, order.unsqueeze(0))), plain_step)
    evaluate, value = evaluation.rollout, lambda rows, states: evaluation.values(rows)
    return {**ways, "evaluate": evaluate, "score": evaluation.score, "value": value, "learn": minibatch.learn}


def _moved(algo: PPO, step: Callable[[], None]) -> Tensor:
    """How `step` changes the parameters, after which all is as it was."""
    flat = algo.parameters.flat.detach()
    with undone([flat, *algo.adam.state_dict().values(), algo.sums, algo.minibatches, algo.stopped]) as before:
        step()
        return flat - before[0]
