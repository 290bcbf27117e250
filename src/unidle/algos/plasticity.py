"""Plasticity metrics: how much of a network can still learn.

*Dormant* (Sokar et al. 2023; McLean et al. 2025): neuron i of a layer is dormant if its score, mean |hᵢ| / (the layer's
average of mean |h| + 1e-9), is at most 0.1; h are activations on a batch. The share is over all hidden layers.
*Rank* (Kumar et al. 2021): the smallest k such that the k largest singular values of the last hidden layer's features
[samples, width] sum to 0.99 of the total; on at most 512 samples, spread evenly over the batch.
*Norms*: of each layer's weights, and of their gradient in the last update, after clipping.

All results are tensors; only the rank waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from unidle.buffers.replay import Transitions
from unidle.nn.critics import Critics
from unidle.nn.encoder import Encoder
from unidle.nn.ensemble import Ensemble
from unidle.nn.optim.flat_parameters import FlatParameters

_MAX_SCORE, _EPSILON = 0.1, 1e-9
_RANK_SAMPLES, _RANK_SHARE = 512, 0.99


class _Actor(Protocol):
    encoder: Encoder

    @property
    def actor_trunk(self) -> nn.Sequential: ...


def actor_critic_plasticity(
    policy: _Actor,
    critics: Critics,
    parameters: tuple[FlatParameters, FlatParameters],
    batch: Transitions,
    clip: float,
) -> dict[str, Tensor]:
    """Metrics of the actor and the first critic; `parameters` are theirs, in this order."""
    _, inputs = critics.inputs(batch.obs, batch.actions)
    parts = {
        "critic": ensemble_plasticity(critics.ensemble, inputs, parameters[1], clip),
        "actor": trunk_plasticity(policy.actor_trunk, policy.encoder(batch.obs), parameters[0], clip),
    }
    return {f"plasticity/{part}/{name}": value for part, metrics in parts.items() for name, value in metrics.items()}


@torch.no_grad()
def ensemble_plasticity(network: Ensemble, inputs: Tensor, flat: FlatParameters, clip: float) -> dict[str, Tensor]:
    """Metrics of the first member, on inputs [B, n]; `flat` holds its parameters, `clip` is `max_grad_norm`."""
    hidden, values = [], inputs
    for weight, bias in zip(network.weights[:-1], network.biases[:-1]):
        values = network.activation(torch.addmm(bias[0], values, weight[0]))
        hidden.append(values)
    return _activity(hidden) | _norms(list(network.weights), flat, clip, lambda tensor: tensor[0])


@torch.no_grad()
def trunk_plasticity(network: nn.Sequential, inputs: Tensor, flat: FlatParameters, clip: float) -> dict[str, Tensor]:
    """Metrics of linear layers with an activation after each; arguments as for `ensemble_plasticity`."""
    hidden, values = [], inputs
    for module in network:
        values = module(values)
        if not isinstance(module, nn.Linear):
            hidden.append(values)
    weights = [module.weight for module in network if isinstance(module, nn.Linear)]
    return _activity(hidden) | _norms(weights, flat, clip, lambda tensor: tensor)


def _activity(hidden: list[Tensor]) -> dict[str, Tensor]:
    if not hidden:  # a linear model has no hidden layer
        return {}
    return {"dormant": dormant_ratio(hidden), "rank": feature_rank(hidden[-1])}


def dormant_ratio(hidden: list[Tensor]) -> Tensor:
    """[] share of dormant neurons, given each layer's activations [B, width]."""
    dormant = []
    for values in hidden:
        mean = values.abs().mean(0)
        dormant.append(mean / (mean.mean() + _EPSILON) <= _MAX_SCORE)
    return torch.cat(dormant).float().mean()


def feature_rank(features: Tensor) -> Tensor:
    """[] effective rank of features [B, width]."""
    sample = features[:: -(-len(features) // _RANK_SAMPLES)].double()  # squares lose small values in single precision
    # The eigenvalues of the smaller Gram matrix are the squares of all singular values.
    gram = sample @ sample.T if len(sample) < sample.shape[1] else sample.T @ sample
    singular_values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    cumulative = singular_values.cumsum(0)
    return (cumulative < _RANK_SHARE * cumulative[-1]).sum() + 1


def _norms(
    weights: list[Tensor], flat: FlatParameters, clip: float, part: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    scale = (clip / (torch.linalg.vector_norm(flat.grad) + 1e-6)).clamp(max=1.0)  # 1 if `grad` is clipped already
    norms: dict[str, Tensor] = {}
    for layer, weight in enumerate(weights):
        norms[f"weight_norm/{layer}"] = torch.linalg.vector_norm(part(weight))
        norms[f"grad_norm/{layer}"] = torch.linalg.vector_norm(part(flat.grad_of(weight))) * scale
    return norms
