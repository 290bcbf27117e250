"""Around image convolutions with channels last: bytes to blocks, bias and ReLU, and their gradients, a pass each.

torch adds the bias in one kernel and applies the activation in another. Backward it multiplies by the activation's
gradient in one and sums for the bias in another. Images have the largest activations of all, so each pass counts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.linear_activation import activation_gradient

_BLOCK = 1024
_MAX_STRIPES = 512  # blocks over the rows of a gradient; each sums its own rows, so that the result is deterministic


@triton.jit
def _to_blocks(
    image, blocks, by_image, by_channel, by_row, by_column, rows, columns,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of blocks of one image, [columns, STRIDE, STRIDE, CHANNELS]."""
    number, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    width = columns * STRIDE * STRIDE * CHANNELS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column, rest = at // (STRIDE * STRIDE * CHANNELS), at % (STRIDE * STRIDE * CHANNELS)
    y, x, channel = rest // (STRIDE * CHANNELS), rest // CHANNELS % STRIDE, rest % CHANNELS
    source = channel * by_channel + (row * STRIDE + y) * by_row + (column * STRIDE + x) * by_column
    pixel = tl.load(image + number.to(tl.int64) * by_image + source, mask=at < width, other=0)
    tl.store(blocks + tl.program_id(0).to(tl.int64) * width + at, pixel.to(tl.float32), mask=at < width)


def image_blocks(image: Tensor, stride: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Bytes [n, channels, height, width] → their first rows × columns blocks of stride × stride pixels as channels.

    The result is [n, stride × stride × channels, rows, columns], channels last.
    """
    n, channels = image.shape[:2]
    width = stride * stride * channels
    blocks = torch.empty(n, rows, columns, width, dtype=dtype, device=image.device)
    grid = (n * rows, triton.cdiv(columns * width, _BLOCK))
    if n:
        _to_blocks[grid](image, blocks, *image.stride(), rows, columns, CHANNELS=channels, STRIDE=stride, BLOCK=_BLOCK)
    return blocks.movedim(-1, 1)


@triton.jit
def _add_bias_and_relu(values, bias, count, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)
    value += tl.load(bias + at % CHANNELS).to(tl.float32)
    tl.store(values + at, tl.where(value < 0, 0.0, value), mask=at < count)  # NaN stays NaN


class _ConvolutionRelu(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)  # only under autocast
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        out = torch.conv2d(values, weight, None, stride, padding).contiguous(memory_format=torch.channels_last)
        if out.numel():
            grid = (triton.cdiv(out.numel(), _BLOCK),)
            _add_bias_and_relu[grid](out, bias, out.numel(), CHANNELS=out.shape[1], BLOCK=_BLOCK)
        ctx.save_for_backward(values, weight, out)
        ctx.geometry = [stride] * 2, [padding] * 2
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        values, weight, out = ctx.saved_tensors
        channels = out.shape[1]
        rows = out.numel() // channels
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        stripes = max(1, min(_MAX_STRIPES, triton.cdiv(rows, 32)))
        width = 32 if channels <= 32 else 64
        dz, sums = activation_gradient(gradient, out, rows, channels, stripes, width, is_relu=True)
        by_values, by_weight, _ = torch.ops.aten.convolution_backward(
            dz, values, weight, None, *ctx.geometry, [1, 1], False, [0, 0], 1, [ctx.needs_input_grad[0], True, False]
        )
        return by_values, by_weight, sums, None, None


def convolution_relu(values: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """max(0, convolution + bias) of values [n, channels, height, width], channels last."""
    out: Tensor = _ConvolutionRelu.apply(values, weight, bias, stride, padding)
    return out
