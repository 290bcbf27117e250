"""Describes networks to the kernels of `unidle.kernels`, which know tensors and plain numbers only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unidle.kernels.triton.small_mlp import ACTIVATIONS, SmallMlp
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.encoder import CLIP
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS


def matmul_precision() -> str:
    """Precision of float32 matrix products in Triton's words."""
    return "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee"


def describe_small_mlp(policy: ActorCritic) -> SmallMlp | str:
    """The description of `policy`, whose parameters are one flat tensor; or the reason why no kernel takes it."""
    distribution, encoder = policy.distribution, policy.encoder
    if policy.critic_trunk is None:
        return "actor and critic share a trunk"
    if distribution.name not in KERNEL_DISTRIBUTIONS:
        return f"the action distribution is {distribution.name}"
    if policy.core is not None:
        return "the policy is recurrent"
    if not encoder.is_plain:
        return "the observation is not one float32 vector"
    trunks = (policy.actor_trunk, policy.critic_trunk)
    layers: list[list[Any]] = [
        [*(module for module in trunk if isinstance(module, nn.Linear)), head]
        for trunk, head in zip(trunks, (policy.actor_head, policy.critic_head))
    ]
    kinds = {type(module) for trunk in trunks for module in trunk if not isinstance(module, nn.Linear)}
    kind = kinds.pop() if len(kinds) == 1 else nn.Identity
    offsets = [tuple(p.storage_offset() for layer in net for p in (layer.weight, layer.bias)) for net in layers]
    description = SmallMlp(
        actor_offsets=offsets[0],
        critic_offsets=offsets[1],
        log_std_offset=int(policy.log_std.storage_offset()) if distribution.reals else 0,
        obs_bytes=policy.obs_layout.obs_bytes,
        mask_offset=policy.obs_layout.mask_offset if policy.masked else None,
        inputs=encoder.n_numbers,
        hidden=tuple(layer.out_features for layer in layers[0][:-1]),
        activation=ACTIVATIONS.get(kind, kind.__name__.lower()),
        nvec=distribution.nvec,
        reals=distribution.reals,
        obs_clip=None if encoder.norm is None else CLIP,
        precision="bf16" if policy.in_bf16 else matmul_precision(),
    )
    return description.unsupported() or description
