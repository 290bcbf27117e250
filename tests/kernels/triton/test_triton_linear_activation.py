"""The fused linear and activation kernel against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 3, 5), (1000, 17, 64), (333, 70, 129)])
def test_layer_matches_torch_values_and_gradients(activation: str, shape: tuple[int, int, int]) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.linear_activation import linear_relu, linear_tanh

    n, ins, outs = shape
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE, requires_grad=True) for size in ((n, ins), (outs, ins), (outs,))]
    weights = torch.randn(n, outs, device=DEVICE)
    layer = linear_tanh if activation == "tanh" else linear_relu
    output = layer(*inputs)
    expected = getattr(torch, activation)(torch.nn.functional.linear(*inputs))
    torch.testing.assert_close(output, expected)
    gradients = (torch.autograd.grad((values * weights).sum(), inputs) for values in (output, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bfloat16_gradient_is_summed_in_float32() -> None:
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("Triton's interpreter uses NumPy, which has no bfloat16")
    from unidle.kernels.triton.linear_activation import linear_relu

    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE, requires_grad=True) for size in ((4096, 8), (16, 8), (16,))]
    with torch.autocast("cuda", torch.bfloat16):
        output = linear_relu(*inputs)
    active = (output > 0).float()
    by_values, by_weight, by_bias = torch.autograd.grad(output.float().sum(), inputs)
    assert torch.equal(by_bias, active.sum(0)), "counts above 256 are not exact in bfloat16"
    torch.testing.assert_close(by_weight, active.t() @ inputs[0], rtol=2e-2, atol=0.5)
    torch.testing.assert_close(by_values, active @ inputs[1], rtol=2e-2, atol=0.1)
