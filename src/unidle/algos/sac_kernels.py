"""Chooses SAC's update on a GPU: describes SAC to the Triton kernels, and verifies them on the first batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unidle.algos.off_policy import Update
from unidle.algos.off_policy_verification import sac_proof_batch, spread_values
from unidle.algos.sac import SAC
from unidle.buffers.replay import Transitions
from unidle.kernels.dispatch import (
    GRADIENT_TOLERANCE,
    NOISE_MARGIN,
    Dispatch,
    compare,
    exact_products,
    matmul_precision,
    relative_error,
    restored,
)
from unidle.nn.ensemble import Ensemble
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.optimiser import fused_step_unsupported
from unidle.spaces.distributions import LOG_STD_RANGE

if TYPE_CHECKING:  # Triton is optional
    from unidle.kernels.triton.sac_update import Layers, SacState, SacUpdate


def choose_sac_update(dispatch: Dispatch, sac: SAC, batch: Transitions, noise: Tensor) -> Update:
    """SAC's Triton update if it supports the case and agrees with `sac.update` on this batch, else `sac.update`."""
    return dispatch.choose(
        "The SAC update",
        sac.update,
        lambda: FusedUpdate(sac),
        lambda fused: verify(sac, fused, batch, noise),
        unsupported(sac),
    )


def unsupported(sac: SAC) -> str | None:
    """Why the kernels do not support this algorithm; None if they do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from unidle.kernels.triton.small_mlp import ACTIVATIONS

    encoder, ensemble = sac.policy.encoder, sac.critics.ensemble
    if not sac.policy.distribution.reals:
        return "actions are discrete"
    if sac.recipe.use_sde:
        return "the noise depends on the state (use_sde)"
    if not encoder.is_float_vector or encoder.norm is not None:
        return "the observation is not one float32 vector"
    if len(ensemble.weights) < 2:
        return "the critics are linear"
    if type(ensemble.activation) not in ACTIVATIONS:
        return f"no kernel for the activation {type(ensemble.activation).__name__}"
    return fused_step_unsupported(sac.recipe)


class FusedUpdate:
    """`SAC.update` by Triton kernels, on the same tensors."""

    def __init__(self, sac: SAC) -> None:
        from unidle.kernels.triton.sac_update import SacUpdate

        self.kernels: SacUpdate = SacUpdate(describe(sac))

    def __call__(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Update from one batch; returns |TD error| [B]."""
        fields = batch.obs, batch.actions, batch.returns, batch.discounts, batch.next_obs, batch.weights
        return self.kernels(*fields, noise)


def describe(sac: SAC) -> SacState:
    """The tensors and constants of `sac` for its kernels."""
    from unidle.kernels.triton.sac_update import Layers, SacState
    from unidle.kernels.triton.small_mlp import ACTIVATIONS

    policy, recipe, ensemble = sac.policy, sac.recipe, sac.critics.ensemble
    assert isinstance(recipe.batch_size, int)
    linears = [*(module for module in policy.actor_trunk if isinstance(module, nn.Linear)), policy.actor_head]
    grad_of = sac.parameters.grad_of
    return SacState(
        actor=Layers([m.weight.detach().t()[None] for m in linears], [m.bias.detach()[None] for m in linears]),
        actor_grads=Layers([grad_of(m.weight).t()[None] for m in linears], [grad_of(m.bias)[None] for m in linears]),
        critics=_layers(ensemble, lambda parameter: parameter.detach()),
        critic_grads=_layers(ensemble, sac.critic_parameters.grad_of),
        targets=_layers(sac.targets.ensemble, lambda parameter: parameter.detach()),
        targets_flat=sac.target_flat,
        actor_adam=_adam(sac, "actor"),
        critics_adam=_adam(sac, "critics"),
        alpha_adam=_adam(sac, "temperature"),
        sums=sac.sums,
        batch_size=recipe.batch_size,
        obs_words=policy.obs_layout.obs_bytes // 4,
        n_inputs=policy.encoder.n_features,
        reals=policy.distribution.reals,
        n_tasks=sac.n_tasks,
        activation=ACTIVATIONS[type(ensemble.activation)],
        log_std_range=LOG_STD_RANGE,
        target_entropy=sac.target_entropy,
        learns_alpha=recipe.ent_coef == "auto",
        value_limit=math.inf if recipe.value_limit is None else recipe.value_limit,
        max_grad_norm=recipe.max_grad_norm,
        tau=recipe.tau,
    )


def _adam(sac: SAC, name: str) -> FlatAdam:
    optimiser = sac.optimisers[name]
    assert isinstance(optimiser, FlatAdam)
    return optimiser


def _layers(ensemble: Ensemble, view: Callable[[Tensor], Tensor]) -> Layers:
    from unidle.kernels.triton.sac_update import Layers

    return Layers([view(weight) for weight in ensemble.weights], [view(bias).squeeze(1) for bias in ensemble.biases])


def verify(sac: SAC, fused: FusedUpdate, batch: Transitions, noise: Tensor) -> None:
    """RuntimeError if the kernels differ from `sac.update` in float32, given how much rounding matters for the latter.

    Each critic is the one with the minimum once. Leaves `sac` unchanged.
    """
    proof = sac_proof_batch(sac, batch)
    precision = matmul_precision() if sac.parameters.flat.is_cuda else "ieee"
    reference, kernels = partial(sac.update, proof, noise), partial(fused, proof, noise)
    names = ("TD errors", "critic gradients", "actor gradients", "α gradients", "losses")
    for lowest in range(sac.recipe.n_critics):
        with spread_values(sac, proof, lowest):
            with exact_products():
                exact = _results(sac, reference)
            rounding = [relative_error(*pair) for pair in zip(_results(sac, reference), exact)]
            rounding[3:] = [max(rounding)] * 2  # of sums, in which errors may cancel by chance
            for name, found, expected, error in zip(names, _results(sac, kernels), exact, rounding):
                compare(name, found, expected, GRADIENT_TOLERANCE[precision] + NOISE_MARGIN * error)
    for name in fused.kernels.steps:
        _verify_step(sac, fused, name)


def _results(sac: SAC, update: Callable[[], Tensor]) -> list[Tensor]:
    """Results of an update with a learning rate of 0.

    With another one, rounding would lead to different critics, from which the actor then learns.
    """
    with restored([*sac.changes, sac.learning_rate]):
        sac.learning_rate.zero_()
        sac.sums.zero_()
        errors = update().clone()
        grads = [parameters.grad.clone() for parameters in (sac.critic_parameters, sac.parameters)]
        for grad in grads:
            if math.isfinite(sac.recipe.max_grad_norm):  # the reference clips in place
                grad.mul_((sac.recipe.max_grad_norm / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0))
        return [errors, *grads, sac.alpha_grad.clone(), sac.sums.clone()]


def _verify_step(sac: SAC, fused: FusedUpdate, name: str) -> None:
    """Compare steps along the same gradient: where it is close to 0, rounding can change the sign of Adam's step."""
    optimiser = _adam(sac, name)
    changed = [optimiser.flat, sac.target_flat, *optimiser.state_dict().values()]

    def changes(step: Callable[[], None]) -> list[Tensor]:
        with restored([*changed, optimiser.grad]) as before:
            step()
            return [tensor - value for tensor, value in zip(changed, before)]

    def fused_step() -> None:
        optimiser.steps.add_(1.0)
        fused.kernels.steps[name].step()

    for ours, reference in zip(changes(fused_step), changes(partial(sac.step, name))):
        compare(f"steps of the {name}", ours, reference, GRADIENT_TOLERANCE["ieee"])
