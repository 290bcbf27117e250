"""NumPy views of a policy's parameters and gradients, for the kernels in `unidle.kernels.numpy`.

The views share memory with the parameters. Create `FlatParameters` first: it moves the parameters to other memory.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from unidle.kernels.numpy import mlp
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import CLIP
from unidle.nn.mlp import ACTIVATIONS
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS

_NAMES = {kind: name for name, kind in ACTIVATIONS.items()}


def numpy_unsupported(policy: nn.Module, rows: int, *, with_critic: bool) -> str | None:
    """Why NumPy does not support `policy`'s actor, or both networks, on batches of `rows`; None if it does."""
    if not isinstance(policy, ActorCritic) or policy.core is not None:
        return "the policy is recurrent or not an actor-critic"
    if not policy.encoder.is_float_vector:
        return "the observation is not one float32 vector"
    if policy.distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {policy.distribution.name}"
    for trunk in (policy.actor_trunk, policy.critic_trunk if with_critic else None):
        if trunk is None:
            continue
        widths = [layer.out_features for layer in trunk if isinstance(layer, nn.Linear)]
        activation = _NAMES[type(trunk[1])] if widths else ""
        reason = mlp.unsupported(widths, activation, policy.distribution.heads, rows)
        if reason is not None:
            return reason
    return None


def numpy_actor(policy: ActorCritic, parameters: FlatParameters | None = None) -> mlp.Actor:
    """Views of `policy`'s actor; with `parameters`, the policy's, also of its gradients."""
    encoder, layout = policy.encoder, policy.obs_layout
    norm = None
    if encoder.norm is not None:
        norm = encoder.norm.shift.numpy(), encoder.norm.scale.numpy(), CLIP
    mask = slice(layout.mask_offset, layout.mask_offset + layout.mask_width) if layout.mask_width else None
    return mlp.Actor(
        inputs=mlp.Inputs(encoder.n_numbers, norm, mask),
        trunk=_trunk(policy.actor_trunk, parameters),
        head=_layer(policy.actor_head, parameters),
        nvec=policy.distribution.nvec,
        log_std=policy.log_std.detach().numpy(),
    )


def numpy_actor_critic(policy: ActorCritic, parameters: FlatParameters) -> mlp.ActorCritic:
    """Views of `policy` and of its gradients in `parameters`."""
    return mlp.ActorCritic(
        actor=numpy_actor(policy, parameters),
        critic_trunk=None if policy.critic_trunk is None else _trunk(policy.critic_trunk, parameters),
        critic_head=_layer(policy.critic_head, parameters),
        log_std_grad=parameters.grad_of(policy.log_std).numpy(),
    )


def _trunk(trunk: nn.Sequential, parameters: FlatParameters | None) -> mlp.Trunk:
    layers = [_layer(module, parameters) for module in trunk if isinstance(module, nn.Linear)]
    return mlp.Trunk(layers, _NAMES[type(trunk[1])])


def _layer(linear: nn.Linear, parameters: FlatParameters | None) -> mlp.Layer:
    def grad(parameter: Tensor) -> np.ndarray:
        assert parameters is not None
        return parameters.grad_of(parameter).numpy()

    grads = None if parameters is None else (grad(linear.weight), grad(linear.bias))
    return mlp.Layer(linear.weight.detach().numpy(), linear.bias.detach().numpy(), grads)
