"""Describes networks to kernels (`unidle.kernels`), which take only tensors and plain numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.kernels.dispatch import matmul_precision
from unidle.kernels.triton.act import ActorMlp
from unidle.kernels.triton.small_mlp import ACTIVATIONS, MlpTensors, SmallMlp
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import CLIP, Encoder
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, LOG_STD_RANGE


def norm_tensors(encoder: Encoder, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale of the observations; `unused` if they are not normalised."""
    return (unused, unused) if encoder.norm is None else (encoder.norm.shift, encoder.norm.scale)


def _linears(trunk: nn.Sequential, head: nn.Linear) -> list[nn.Linear]:
    return [*(module for module in trunk if isinstance(module, nn.Linear)), head]


def _activation(*trunks: nn.Sequential) -> str:
    kinds = {type(module) for trunk in trunks for module in trunk if not isinstance(module, nn.Linear)}
    kind = kinds.pop() if len(kinds) == 1 else nn.Identity
    return ACTIVATIONS.get(kind, kind.__name__.lower())


def describe_small_mlp(policy: ActorCritic) -> SmallMlp | str:
    """The description of `policy`, whose parameters must be one flat tensor; or why no kernel supports it."""
    distribution, encoder = policy.distribution, policy.encoder
    if policy.critic_trunk is None:
        return "actor and critic share a trunk"
    if distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {distribution.name}"
    if policy.core is not None:
        return "the policy is recurrent"
    if not encoder.is_float_vector:
        return "the observation is not one float32 vector"
    layers = [_linears(policy.actor_trunk, policy.actor_head), _linears(policy.critic_trunk, policy.critic_head)]
    hidden, critic_hidden = (tuple(layer.out_features for layer in network[:-1]) for network in layers)
    if hidden != critic_hidden:
        return f"the actor has hidden layers {hidden} and the critic {critic_hidden}: kernels take equal ones"
    offsets = [tuple(int(p.storage_offset()) for layer in net for p in (layer.weight, layer.bias)) for net in layers]
    description = SmallMlp(
        actor_offsets=offsets[0],
        critic_offsets=offsets[1],
        log_std_offset=int(policy.log_std.storage_offset()) if distribution.reals else 0,
        obs_bytes=policy.obs_layout.obs_bytes,
        mask_offset=policy.obs_layout.mask_offset if policy.masked else None,
        inputs=encoder.n_numbers,
        hidden=hidden,
        activation=_activation(policy.actor_trunk, policy.critic_trunk),
        nvec=distribution.nvec,
        reals=distribution.reals,
        obs_clip=None if encoder.norm is None else CLIP,
        precision="bf16" if policy.in_bf16 else matmul_precision(),
    )
    return description.unsupported() or description


def small_mlp_tensors(policy: ActorCritic) -> MlpTensors:
    """The tensors of such a policy, or of a copy of it; the parameters must be one flat tensor."""
    first = next(parameter for parameter in policy.parameters() if parameter.numel())
    assert first.storage_offset() == 0
    return MlpTensors(first, *norm_tensors(policy.encoder, first))


def describe_actor(policy: nn.Module) -> ActorMlp | str:
    """The description of `policy`'s actor, or why no kernel supports it."""
    if not isinstance(policy, (ActorCritic, SACPolicy)):
        return "the policy does not sample from a Gaussian"
    encoder, distribution = policy.encoder, policy.distribution
    if isinstance(policy, ActorCritic) and (policy.core is not None or policy.in_bf16):
        return "the policy is recurrent or in bfloat16"
    if isinstance(policy, ActorCritic) and distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {distribution.name}"
    if isinstance(policy, SACPolicy) and policy.log_std is not None:
        return "the noise depends on the state (use_sde)"
    if not encoder.is_float_vector:
        return "the observation is not one float32 vector"
    if policy.masked or distribution.heads:
        return "some actions are discrete"
    layers = _linears(policy.actor_trunk, policy.actor_head)
    storage = policy.actor_head.weight.untyped_storage().data_ptr()
    if any(layer.weight.untyped_storage().data_ptr() != storage for layer in layers):
        return "the parameters are not one flat tensor"
    return ActorMlp(
        widths=(encoder.n_numbers, *(layer.out_features for layer in layers)),
        weight_offsets=tuple(int(layer.weight.storage_offset()) for layer in layers),
        bias_offsets=tuple(int(layer.bias.storage_offset()) for layer in layers),
        activation=_activation(policy.actor_trunk),
        obs_clip=None if encoder.norm is None else CLIP,
        reals=distribution.reals,
        n_tasks=policy.n_tasks if isinstance(policy, SACPolicy) else 0,
        log_std_range=LOG_STD_RANGE,
        precision=matmul_precision(),
    )


def actor_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """The tensors of such an actor, as fields of `ActTensors`."""
    assert isinstance(policy, (ActorCritic, SACPolicy))
    distribution, weight = policy.distribution, policy.actor_head.weight
    shift, scale = norm_tensors(policy.encoder, weight)
    return {
        "norm_shift": shift,
        "norm_scale": scale,
        "parameters": torch.empty(0, device=weight.device).set_(weight.untyped_storage()),
        # SAC's log_std is an output of the network; its kernel needs here whether actions are uniformly random.
        "log_std": policy.distribution.at_random if isinstance(policy, SACPolicy) else policy.log_std,
        "action_scale": distribution.scale,
        "action_shift": distribution.shift,
        "action_low": distribution.low,
        "action_high": distribution.high,
    }
