"""Q functions of small MLPs on a CPU: an ensemble of critics, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from unidle.kernels.numpy.mlp import Network

Activations = list[np.ndarray]  # of a network's layers, for its backward pass
_ROWS = 32  # numbers of rows are rounded up to multiples of this: oneDNN compiles a product for each number


def q_values(critics: Sequence[Network], x: np.ndarray) -> tuple[list[Activations], np.ndarray]:
    """The activations of each critic, and its outputs [E, B, outs]."""
    passes = [critic(x) for critic in critics]
    return [activations for activations, _ in passes], np.stack([y for _, y in passes])


def backward(critics: Sequence[Network], activations: Sequence[Activations], d_q: np.ndarray) -> None:
    """Write the critics' gradients, given those with respect to their outputs [E, B, outs]."""
    for critic, critic_activations, d_y in zip(critics, activations, d_q):
        critic.backward(critic_activations, d_y)


def minimum_gradient(
    critics: Sequence[Network],
    activations: Sequence[Activations],
    q: np.ndarray,
    d_minimum: np.ndarray,
    inputs: slice,
) -> np.ndarray:
    """The gradient with respect to these columns of the input, given that with respect to min Q [B]; q is [E, B].

    Each critic backpropagates the rows in which it is the minimum, and a few others: in total one pass instead of E.
    """
    is_minimum = q == q.min(0)
    d_q = is_minimum * (d_minimum / is_minimum.sum(0, dtype=np.float32))  # as in torch, equal ones share; NaN stays NaN
    d_x = np.zeros((len(d_minimum), inputs.stop - inputs.start), np.float32)
    for critic, critic_activations, d_y in zip(critics, activations, d_q):
        n_rows = -(-np.count_nonzero(d_y) // _ROWS) * _ROWS
        if n_rows:
            rows = np.argsort(d_y == 0.0, kind="stable")[:n_rows]
            index = torch.from_numpy(rows)
            chosen = [torch.from_numpy(y).index_select(0, index).numpy() for y in critic_activations]
            d_x[rows] += critic.input_gradient(chosen, d_y[rows, None], inputs)
    return d_x
