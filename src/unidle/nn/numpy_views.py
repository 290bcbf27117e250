"""NumPy views of networks and their gradients, for the kernels in `unidle.kernels.numpy`.

The views share memory with the parameters. Create `FlatParameters` first: it moves the parameters to other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from unidle.kernels.numpy import act, mlp
from unidle.kernels.numpy.dqn_gradient import QNetwork
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import CLIP
from unidle.nn.ensemble import Ensemble
from unidle.nn.mlp import ACTIVATIONS
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.q_policy import QPolicy
from unidle.nn.sac_policy import SACPolicy
from unidle.nn.td3_policy import TD3Policy
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, LOG_ZERO

OffPolicyPolicy = SACPolicy | TD3Policy | QPolicy

_NAMES = {kind: name for name, kind in ACTIVATIONS.items()}
_OFF_POLICY_DISTRIBUTIONS = {"squashed", "categorical", "deterministic", "epsilon-greedy"}


# -- what is supported -------------------------------------------------------------------------------------------------


def numpy_unsupported(policy: nn.Module, rows: int, *, with_critic: bool) -> str | None:
    """Why NumPy does not support `policy`'s actor, or both networks, on batches of `rows`; None if it does."""
    if not isinstance(policy, ActorCritic) or policy.core is not None:
        return "the policy is recurrent or not an actor-critic"
    if policy.distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {policy.distribution.name}"
    critic = policy.critic_trunk if with_critic else None
    return _unsupported(policy, [policy.actor_trunk, *([] if critic is None else [critic])], rows)


def off_policy_unsupported(policy: OffPolicyPolicy, rows: int) -> str | None:
    """Why NumPy does not support the policy of an off-policy algorithm on batches of `rows`; None if it does."""
    if policy.n_tasks > 1:
        return "there are several tasks"
    if policy.distribution.name not in _OFF_POLICY_DISTRIBUTIONS:
        return f"the action distribution is {policy.distribution.name}"
    return _unsupported(policy, [policy.trunk if isinstance(policy, QPolicy) else policy.actor_trunk], rows)


def acting_unsupported(policy: ActorCritic | OffPolicyPolicy, rows: int) -> str | None:
    """Why NumPy does not support inference with `policy` on `rows` observations; None if it does."""
    if isinstance(policy, ActorCritic):
        return numpy_unsupported(policy, rows, with_critic=False)
    return off_policy_unsupported(policy, rows)


def ensemble_unsupported(ensemble: Ensemble, rows: int) -> str | None:
    """Why NumPy does not support these critics on batches of `rows`; None if it does."""
    widths = [weight.shape[2] for weight in ensemble.weights][:-1]
    return mlp.unsupported(widths, _NAMES[type(ensemble.activation)], 0, rows)


def _unsupported(policy: ActorCritic | OffPolicyPolicy, trunks: Sequence[nn.Sequential], rows: int) -> str | None:
    if not policy.encoder.is_float_vector:
        return "the observation is not one float32 vector"
    for trunk in trunks:
        widths = [layer.out_features for layer in trunk if isinstance(layer, nn.Linear)]
        activation = _NAMES[type(trunk[1])] if widths else ""
        reason = mlp.unsupported(widths, activation, policy.distribution.heads, rows)
        if reason is not None:
            return reason
    return None


# -- acting ------------------------------------------------------------------------------------------------------------


def numpy_acting(policy: ActorCritic | OffPolicyPolicy) -> tuple[act.Outputs, act.Sample]:
    """The network of `policy`'s actor, and how actions are sampled from its outputs."""
    nvec, n_logits = policy.distribution.nvec, policy.distribution.n_logits
    if isinstance(policy, QPolicy):
        q_network = numpy_q_network(policy)
        return lambda obs: q_network(obs)[1], act.EpsilonGreedySample(nvec, policy.distribution.epsilon.numpy())
    inputs, network = numpy_inputs(policy), numpy_actor(policy)

    def outputs(obs: np.ndarray) -> np.ndarray:
        x, masked_out = inputs(obs)
        y = network(x)[1]
        if masked_out is not None:
            y[:, :n_logits][masked_out] = LOG_ZERO
        return y

    if isinstance(policy, SACPolicy):
        return outputs, act.SquashedSample(nvec, policy.distribution.at_random.numpy())
    if isinstance(policy, TD3Policy):
        return outputs, act.NoisySample(policy.distribution.exploration_noise, policy.distribution.at_random.numpy())
    return outputs, act.GaussianSample(nvec, policy.log_std.detach().numpy())


# -- networks; with their `parameters`, for training -------------------------------------------------------------------


def numpy_inputs(policy: ActorCritic | OffPolicyPolicy) -> mlp.Inputs:
    """How packed observations become the inputs of `policy`'s networks."""
    encoder, layout = policy.encoder, policy.obs_layout
    norm = None
    if encoder.norm is not None:
        norm = encoder.norm.shift.numpy(), encoder.norm.scale.numpy(), CLIP
    mask = slice(layout.mask_offset, layout.mask_offset + layout.mask_width) if layout.mask_width else None
    return mlp.Inputs(encoder.n_numbers, norm, mask)


def numpy_actor(policy: ActorCritic | SACPolicy | TD3Policy, parameters: FlatParameters | None = None) -> mlp.Network:
    """The actor."""
    return mlp.Network(_trunk(policy.actor_trunk, parameters), _layer(policy.actor_head, parameters))


def numpy_actor_critic(policy: ActorCritic, parameters: FlatParameters) -> mlp.ActorCritic:
    """Actor and critic."""
    actor = numpy_actor(policy, parameters)
    return mlp.ActorCritic(
        actor=mlp.Actor(
            inputs=numpy_inputs(policy),
            trunk=actor.trunk,
            head=actor.head,
            nvec=policy.distribution.nvec,
            log_std=policy.log_std.detach().numpy(),
        ),
        critic_trunk=None if policy.critic_trunk is None else _trunk(policy.critic_trunk, parameters),
        critic_head=_layer(policy.critic_head, parameters),
        log_std_grad=parameters.grad_of(policy.log_std).numpy(),
    )


def numpy_q_network(policy: QPolicy, parameters: FlatParameters | None = None) -> QNetwork:
    """The Q network."""
    return QNetwork(
        numpy_inputs(policy),
        _trunk(policy.trunk, parameters),
        _layer(policy.head, parameters),
        None if policy.value_head is None else _layer(policy.value_head, parameters),
        policy.distribution.nvec,
    )


def numpy_critics(ensemble: Ensemble, parameters: FlatParameters | None = None) -> list[mlp.Network]:
    """The members of an ensemble, whose weights are [member, ins, outs] and biases [member, 1, outs]."""

    def layer(weight: Tensor, bias: Tensor, member: int) -> mlp.Layer:
        grads = None
        if parameters is not None:
            grads = (
                parameters.grad_of(weight)[member].t().numpy(),
                parameters.grad_of(bias)[member, 0].numpy(),
            )
        return mlp.Layer(weight.detach()[member].t().numpy(), bias.detach()[member, 0].numpy(), grads)

    critics = []
    for member in range(len(ensemble.weights[0])):
        *hidden, head = (layer(*pair, member) for pair in zip(ensemble.weights, ensemble.biases))
        critics.append(mlp.Network(mlp.Trunk(hidden, _NAMES[type(ensemble.activation)]), head))
    return critics


def _trunk(trunk: nn.Sequential, parameters: FlatParameters | None) -> mlp.Trunk:
    layers = [_layer(module, parameters) for module in trunk if isinstance(module, nn.Linear)]
    return mlp.Trunk(layers, _NAMES[type(trunk[1])])


def _layer(linear: nn.Linear, parameters: FlatParameters | None) -> mlp.Layer:
    def grad(parameter: Tensor) -> np.ndarray:
        assert parameters is not None
        return parameters.grad_of(parameter).numpy()

    grads = None if parameters is None else (grad(linear.weight), grad(linear.bias))
    return mlp.Layer(linear.weight.detach().numpy(), linear.bias.detach().numpy(), grads)
