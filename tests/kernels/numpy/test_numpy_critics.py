"""Gradients of an ensemble of critics in NumPy against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unidle.kernels.numpy.critics import minimum_gradient, q_values
from unidle.nn.ensemble import Ensemble
from unidle.nn.numpy_views import numpy_critics


@pytest.mark.parametrize("batch_size", [1, 31, 100, 256])
@pytest.mark.parametrize("width", [16, 256])
def test_gradient_of_the_minimum_matches_autograd(width: int, batch_size: int) -> None:
    torch.manual_seed(0)
    ensemble = Ensemble(3, 7, (width, width), 1, "relu")
    x = torch.randn(batch_size, 7, requires_grad=True)
    weights = torch.randn(batch_size)
    weights[::5] = 0.0  # rows without a gradient
    (weights * ensemble(x).squeeze(-1).amin(0)).sum().backward()
    assert x.grad is not None

    critics = numpy_critics(ensemble)
    activations, q = q_values(critics, x.detach().numpy())
    found = minimum_gradient(critics, activations, q[..., 0], weights.numpy(), slice(4, 7))
    np.testing.assert_allclose(found, x.grad[:, 4:].numpy(), rtol=1e-3, atol=1e-5)
