"""The kernels of image convolutions against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize(
    ("channels", "stride", "rows", "columns", "extra"),
    [(4, 4, 3, 5, 0), (3, 4, 2, 3, 2), (1, 2, 4, 1, 1), (4, 4, 1, 30, 0)],
)
def test_blocks_are_pixels_in_order(
    channels: int, stride: int, rows: int, columns: int, extra: int, is_channels_last: bool
) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.image_convolution import image_blocks

    size = (3, channels, rows * stride + extra, columns * stride + extra)
    image = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    if is_channels_last:
        image = image.contiguous(memory_format=torch.channels_last)
    blocks = image_blocks(image, stride, rows, columns, torch.float32)
    assert blocks.shape == (3, stride * stride * channels, rows, columns)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    for row in range(rows):
        for column in range(columns):
            part = image[:, :, row * stride : (row + 1) * stride, column * stride : (column + 1) * stride]
            assert torch.equal(blocks[:, :, row, column], part.permute(0, 2, 3, 1).flatten(1).float())


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "stride", "padding", "side", "n"),
    [(8, 16, 2, 1, 0, 6, 3), (3, 5, 3, 2, 1, 9, 2), (4, 33, 3, 1, 0, 13, 7), (4, 6, 3, 1, 0, 3, 1)],
)
def test_layer_matches_torch_values_and_gradients(
    channels: int, outputs: int, kernel: int, stride: int, padding: int, side: int, n: int
) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.image_convolution import convolution_relu

    torch.manual_seed(0)
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    values = torch.randn(n, channels, side, side, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, channels, kernel, kernel, device=DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (values, weight, torch.randn(outputs, device=DEVICE))]
    output = convolution_relu(*inputs, stride, padding)
    expected = torch.nn.functional.conv2d(*inputs, stride, padding).relu()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert output.is_contiguous(memory_format=torch.channels_last)
    weighting = torch.randn_like(expected)
    gradients = (torch.autograd.grad((each * weighting).sum(), inputs) for each in (output, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.backends.cudnn.allow_tf32 = before


def test_gradient_by_pixels_is_not_computed() -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.image_convolution import convolution_relu

    weight = torch.randn(2, 3, 3, 3, device=DEVICE, requires_grad=True)
    pixels = torch.randn(1, 3, 5, 5, device=DEVICE)
    bias = torch.zeros(2, device=DEVICE, requires_grad=True)
    convolution_relu(pixels, weight, bias, 1, 0).sum().backward()
    assert pixels.grad is None
    assert weight.grad is not None


def test_nan_is_not_hidden() -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.image_convolution import convolution_relu

    bias = torch.tensor([float("nan"), 1.0], device=DEVICE)
    out = convolution_relu(torch.ones(1, 1, 4, 4, device=DEVICE), torch.ones(2, 1, 2, 2, device=DEVICE), bias, 1, 0)
    assert out[:, 0].isnan().all()
    assert (out[:, 1] == 5).all()


def test_bfloat16_is_used_under_autocast_and_bias_gradient_is_summed_in_float32() -> None:
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("Triton's interpreter uses NumPy, which has no bfloat16")
    from unidle.kernels.triton.image_convolution import convolution_relu

    torch.manual_seed(0)
    values = torch.randn(64, 8, 12, 12, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(16, 8, 3, 3, device=DEVICE), torch.randn(16, device=DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (values, weight, bias)]
    with torch.autocast("cuda", torch.bfloat16):
        output = convolution_relu(*inputs, 1, 0)
    assert output.dtype == torch.bfloat16
    by_bias = torch.autograd.grad(output.float().sum(), inputs)[2]
    assert torch.equal(by_bias, (output > 0).sum((0, 2, 3)).float()), "counts above 256 are not exact in bfloat16"
