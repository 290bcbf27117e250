"""The first convolution of an image encoder, straight from bytes; and kernels of image convolutions.

    uint8 → float32 → ÷ 255 → convolution               the plain formula
    uint8 → compute dtype → convolution with w ÷ 255    here: one kernel before the convolution instead of three

Bytes are exact in bfloat16 and in TF32, fractions of 255 are not, so the division belongs to the weights. Images are
converted with channels last, the layout of tensor cores, and later layers keep it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unidle.kernels.dispatch import Dispatch, compare, warn

_UNIT = 1.0 / 255.0


class ImageKernels(NamedTuple):
    """Faster implementations of parts of image convolutions, with channels last."""

    # (image, stride, rows, columns, dtype) → blocks of pixels as channels
    image_blocks: Callable[[Tensor, int, int, int, torch.dtype], Tensor]
    # (values, weight, bias, stride, padding) → max(0, convolution + bias)
    convolution_relu: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


@functools.cache
def image_kernels() -> ImageKernels | None:
    """Those for this GPU; None if they do not work here."""
    return Dispatch(warn).choose("Image convolutions", None, _triton_kernels, _verify_kernels)


def _triton_kernels() -> ImageKernels:
    from unidle.kernels.triton.image_convolution import convolution_relu, image_blocks

    return ImageKernels(image_blocks, convolution_relu)


def _verify_kernels(kernels: ImageKernels | None) -> None:
    """RuntimeError unless values and gradients agree with torch's."""
    assert kernels is not None
    # The first images may come with inference, which records no gradients.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        image = torch.arange(2 * 3 * 9 * 13, device="cuda").view(2, 3, 9, 13).byte()
        for source in (image, image.contiguous(memory_format=torch.channels_last)):
            compare(
                "blocks", kernels.image_blocks(source, 4, 2, 3, torch.float32), _blocks(source, 4, 2, 3, torch.float32)
            )
        shapes = ((2, 8, 7, 9), (5, 8, 3, 3), (5,))
        values, weight, bias = (torch.linspace(-1, 1, math.prod(shape), device="cuda").view(shape) for shape in shapes)
        values = values.contiguous(memory_format=torch.channels_last)
        inputs = [tensor.requires_grad_() for tensor in (values, weight, bias)]
        found = kernels.convolution_relu(values, weight, bias, 1, 1)
        expected = nn.functional.conv2d(values, weight, bias, 1, 1).relu()
        compare("convolutions", found, expected)
        for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))):
            compare("gradients of convolutions", ours, theirs)


def convolve_images(
    image: Tensor, layers: nn.Sequential, dtype: torch.dtype, kernels: ImageKernels | None = None
) -> Tensor:
    """`layers(image / 255)` of uint8 images [n, channels, height, width] in any memory layout, computed in `dtype`.

    The first layer is a convolution.
    """
    values, left = image, list(layers)
    while left:
        layer = left.pop(0)
        if not isinstance(layer, nn.Conv2d):
            values = layer(values)
            continue
        weight, stride = layer.weight, layer.stride[0]
        if values is image:
            values, weight, stride = _from_bytes(image, layer, dtype, kernels)
        if kernels is not None and layer.bias is not None and left and isinstance(left[0], nn.ReLU):
            del left[0]
            values = kernels.convolution_relu(values, weight, layer.bias, stride, int(layer.padding[0]))
        else:
            values = nn.functional.conv2d(values, weight, layer.bias, stride, layer.padding)
    return values


def _from_bytes(
    image: Tensor, layer: nn.Conv2d, dtype: torch.dtype, kernels: ImageKernels | None
) -> tuple[Tensor, Tensor, int]:
    """Input, weight and stride of a convolution that is `layer(image / 255)`.

    Where the kernel is whole strides wide, blocks of stride × stride pixels become channels (space to depth), with
    stride 1: three or four channels, as images have them, do not fill tensor cores; 4 × 4 blocks of them have 48 or 64.
    Pixels beyond the last window are cut off.
    """
    weight, stride, size = layer.weight * _UNIT, layer.stride[0], layer.kernel_size[0]
    if stride == 1 or size % stride or layer.padding != (0, 0):
        return image.to(dtype, memory_format=torch.channels_last), weight, stride
    kernel = size // stride  # in blocks
    rows, columns = ((side - size) // stride + kernel for side in image.shape[2:])
    blocks = _blocks if kernels is None else kernels.image_blocks
    weight = weight.unflatten(3, (kernel, stride)).unflatten(2, (kernel, stride)).permute(0, 3, 5, 1, 2, 4)
    return blocks(image, stride, rows, columns, dtype), weight.flatten(1, 3), 1


def _blocks(image: Tensor, stride: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The first rows × columns blocks of pixels as channels: [n, stride × stride × channels, rows, columns]."""
    blocks = (
        image[..., : rows * stride, : columns * stride].unflatten(3, (columns, stride)).unflatten(2, (rows, stride))
    )
    # One copy: [n, rows, columns, stride, stride, channels], converted.
    blocks = blocks.permute(0, 2, 4, 3, 5, 1).to(dtype, memory_format=torch.contiguous_format)
    return blocks.flatten(3).movedim(-1, 1)
