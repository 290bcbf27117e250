"""Verifies implementations of PPO's loss, gradient and step against the references, before a run learns with them.

A run's own first minibatch cannot prove much: all ratios are 1, so nothing is clipped; all values are the old ones; the
output layers are so small that hidden layers and entropy hardly count. So the proof moves the weights, samples actions
from the moved policy, and compares two batches with ratios, advantages and values of its own:

- "mixed": ratios on both sides of the clip range and inside it, each with advantages of both signs; likewise values;
- "clipped": no sample has a policy gradient, so the actor's gradient is that of the entropy alone.

The parameters of the actor and those that the value depends on are compared separately, each relative to its own norm.
Everything is restored afterwards, bit for bit; random numbers come from a separate generator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from unidle.algos.ppo import PPO, Batch
from unidle.kernels.dispatch import (
    GRADIENT_TOLERANCE,
    NOISE_MARGIN,
    compare,
    exact_products,
    matmul_precision,
    relative_error,
    restored,
)
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.distributions import Parameters

GradientOf = Callable[[Batch, Tensor], Tensor]  # (batch, order) → metrics [5]; writes the flat gradient

_SAME_NUMBERS = GRADIENT_TOLERANCE["ieee"]  # where both sides start from the same numbers
_BEYOND = 0.5  # from the clip range to log-ratios that are clipped
_METRICS = ("policy losses", "value losses", "entropies", "KL divergences", "clip fractions")


def separate_generator(ppo: PPO) -> torch.Generator:
    """A generator of its own: verification must not change the run's random numbers."""
    return torch.Generator(ppo.parameters.flat.device).manual_seed(0)


def importance(ppo: PPO, shape: tuple[int, ...]) -> Tensor | None:
    """Importance weights from 0 to 2 if the run uses such weights."""
    if ppo.recipe.overlap != "strict":
        return None
    return 2 * torch.rand(shape, generator=separate_generator(ppo), device=ppo.parameters.flat.device)


# -- batches -----------------------------------------------------------------------------------------------------------


@contextmanager
def moved_weights(ppo: PPO) -> Iterator[None]:
    """Moves the weights away from their initialisation, and restores them afterwards."""
    generator = separate_generator(ppo)
    with restored([ppo.parameters.flat.detach()]):
        for parameter in ppo.policy.parameters():
            if parameter.requires_grad and parameter.numel():
                scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
                parameter.data.add_(scale * torch.empty_like(parameter.data).normal_(generator=generator))
        yield


@torch.no_grad()
def proof_batches(ppo: PPO, batch: Batch, order: Tensor, params: Parameters, values: Tensor) -> Iterator[Batch]:
    """Copies of `batch` whose minibatch `order` is "mixed", then "clipped".

    `params` and `values` are what the policy computes for that minibatch.
    """
    generator, clip = separate_generator(ppo), min(float(ppo.clip_range), 0.9)
    index = torch.arange(values.numel(), device=values.device).view_as(values)  # [n, L]

    def spread(*choices: float, every: int = 1) -> Tensor:
        return values.new_tensor(choices)[index // every % len(choices)]

    def uniform() -> Tensor:
        return torch.rand(values.shape, generator=generator, device=values.device)

    distribution = ppo.policy.distribution
    actions = distribution.sample(params, distribution.noise(tuple(values.shape), generator))
    log_probs, _ = distribution.log_prob_and_entropy(params, actions)
    signs = spread(1.0, -1.0)
    advantages = 3 * signs * (0.75 + 0.5 * uniform()) + 0.75
    # More above than below: if they cancelled, rounding would decide the direction of their gradient.
    errors = (1 + values.abs().mean()) * spread(1.5, -0.5, every=8) * (0.5 + uniform())
    limit = ppo.recipe.clip_range_vf
    old_values = values if limit is None else values - limit * spread(-2.0, 0.5, 2.0)
    # Far from the bounds, so that rounding does not decide what is clipped.
    below, above = math.log(1 - clip) - _BEYOND, math.log(1 + clip) + _BEYOND
    log_ratios = spread(below, -clip / 2, clip / 2, above, every=2), torch.where(signs > 0, above, below)
    for log_ratio in log_ratios:
        fields = {
            "actions": actions,
            "log_probs": log_probs - log_ratio,
            "advantages": advantages,
            "values": old_values,
            "returns": values - errors,
        }
        replaced = {name: getattr(batch, name).index_copy(0, order, field) for name, field in fields.items()}
        yield dataclasses.replace(batch, **replaced, weights=importance(ppo, tuple(batch.advantages.shape)))


def _outputs(ppo: PPO, batch: Batch, order: Tensor) -> tuple[Parameters, Tensor]:
    minibatch = batch.at(order)
    with torch.no_grad():
        params, values = ppo.policy(minibatch.obs, minibatch.starts, minibatch.states)
    return params, values


# -- gradients ---------------------------------------------------------------------------------------------------------


def verify_gradient(ppo: PPO, batch: Batch, order: Tensor, reference: GradientOf, ours: GradientOf) -> None:
    """RuntimeError unless gradients and metrics agree with those of the reference in float32.

    Where products are rounded, a kernel is allowed a multiple of the reference's own distance from float32: that shows
    how much rounding matters for this network.
    """
    precision = _precision(ppo)
    rounded = precision != "ieee"
    with restored([ppo.parameters.grad]), moved_weights(ppo):
        with _in_float32(ppo.policy):
            outputs = _outputs(ppo, batch, order)
        for proof_batch in proof_batches(ppo, batch, order, *outputs):
            with _in_float32(ppo.policy):
                exact = _results(ppo, reference, proof_batch, order)
            noise = [0.0, 0.0]
            if rounded:
                noise = list(map(relative_error, _results(ppo, reference, proof_batch, order)[:2], exact))
            noise += [max(noise)] * len(_METRICS)
            names = ("actor's gradients", "critic's gradients", *_METRICS)
            for name, found, expected, error in zip(names, _results(ppo, ours, proof_batch, order), exact, noise):
                tolerance = GRADIENT_TOLERANCE[precision] + NOISE_MARGIN * error
                compare(
                    name, found, expected, 2 * tolerance if name in _METRICS else tolerance
                )  # terms cancel in means


def _precision(ppo: PPO) -> str:
    """Precision of the policy's matrix products."""
    if ppo.parameters.flat.device.type != "cuda":
        return "ieee"
    return "bf16" if ppo.policy.in_bf16 else matmul_precision()


@contextmanager
def _in_float32(policy: ActorCritic) -> Iterator[None]:
    """Computes the policy's matrix products in float32."""
    in_bf16 = policy.in_bf16
    policy.in_bf16 = False
    try:
        with exact_products():
            yield
    finally:
        policy.in_bf16 = in_bf16


def _results(ppo: PPO, gradient: GradientOf, batch: Batch, order: Tensor) -> list[Tensor]:
    """The gradient of the actor alone, that of what the value depends on, and each metric."""
    metrics = gradient(batch, order)
    policy = ppo.policy
    critics = policy.critic_head, policy.actor_trunk if policy.critic_trunk is None else policy.critic_trunk
    of_value = {id(parameter) for module in critics for parameter in module.parameters()}
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parts[id(parameter) in of_value].append(ppo.parameters.grad_of(parameter).flatten())
    return [*map(torch.cat, parts), *metrics]


# -- loss --------------------------------------------------------------------------------------------------------------


def verify_loss(
    ppo: PPO, batch: Batch, order: Tensor, loss: Callable[[tuple[Tensor, ...], Batch, Tensor], list[Tensor]]
) -> None:
    """RuntimeError unless loss, metrics and gradients match the reference.

    `loss` computes all three from the network's outputs: logits, means, log_std and values.
    """
    with moved_weights(ppo):
        params, values = _outputs(ppo, batch, order)
        # Copies: log_std is a parameter, which is restored.
        outputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (*params, values)]
    params, values = type(params)(*outputs[:-1]), outputs[-1]
    for tensor in outputs:
        tensor.requires_grad_()
    names = ("loss", "metrics", "logit gradients", "mean gradients", "log_std gradients", "value gradients")
    for proof_batch in proof_batches(ppo, batch, order, params, values):
        minibatch = proof_batch.at(order)
        with torch.enable_grad():
            reference = ppo.loss(params, values, minibatch, minibatch.advantages)
            gradients = torch.autograd.grad(reference.loss, outputs, materialize_grads=True)
        with torch.no_grad():
            value, metrics, *ours = loss(tuple(outputs), proof_batch, order)
        found, expected = (value, metrics, *ours), (reference.loss, reference.means, *gradients)
        for name, one, other in zip(names, found, expected, strict=True):
            for part, expected_part in zip(*((x.unbind() if name == "metrics" else [x]) for x in (one, other))):
                compare(name, part, expected_part, _SAME_NUMBERS)


# -- steps -------------------------------------------------------------------------------------------------------------


def verify_learning(
    ppo: PPO, batch: Batch, order: Tensor, gradient: GradientOf, learn: Callable[[Batch, Tensor], None]
) -> None:
    """RuntimeError unless `learn` steps along `gradient` as `PPO.step` does.

    Both get the same gradient: where one is close to 0, rounding can change the sign of Adam's step.
    """
    outputs = _outputs(ppo, batch, order)
    # On the batch itself the KL divergence is 0; on the others it may end the iteration.
    for each in (batch, *proof_batches(ppo, batch, order, *outputs)):
        with restored([ppo.parameters.grad]):
            expected = _changes(ppo, partial(ppo.step, gradient(each, order)))
            found = _changes(ppo, partial(learn, each, order.unsqueeze(0)))
        for ours, theirs in zip(found, expected):
            compare("step", ours, theirs, _SAME_NUMBERS)


def verify_step(ppo: PPO, step: Callable[[Tensor], None]) -> None:
    """RuntimeError unless `step` makes the same changes as `PPO.step`: clipped or not, stopped by the KL or not."""
    grad, max_norm, max_kl = ppo.parameters.grad, ppo.recipe.max_grad_norm, ppo.coefficients.max_kl or 0.0
    for share, kl in ((0.5, 0.0), (2.0, 0.0), (2.0, 2 * max_kl)):
        with restored([grad]):
            for parameter in ppo.policy.parameters():
                if parameter.requires_grad:
                    ppo.parameters.grad_of(parameter).normal_(generator=separate_generator(ppo))
            grad.mul_(share * (max_norm if math.isfinite(max_norm) else 1.0) / torch.linalg.vector_norm(grad))
            metrics = torch.tensor([1.0, 2.0, 3.0, kl, 5.0], device=grad.device)
            found, expected = (_changes(ppo, partial(make, metrics)) for make in (step, ppo.step))
        for ours, theirs in zip(found, expected):
            compare("step", ours, theirs, _SAME_NUMBERS)


def _changes(ppo: PPO, step: Callable[[], None]) -> list[Tensor]:
    """The changes that `step` makes to the parameters, and the counters after it; all are restored."""
    flat, counters = ppo.parameters.flat.detach(), ppo.counters
    counted = [counters.sums, counters.minibatches, counters.stopped]
    with restored([flat, ppo.parameters.grad, *ppo.optimiser.state_dict().values(), *counted]) as before:
        step()
        return [flat - before[0], *(tensor.clone() for tensor in counted)]
