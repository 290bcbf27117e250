"""The first convolution of an image encoder, straight from bytes.

    uint8 → float32 → ÷ 255 → convolution               the plain formula
    uint8 → compute dtype → convolution with w ÷ 255    here: one kernel before the convolution instead of three

Bytes are exact in bfloat16 and in TF32, fractions of 255 are not, so the division belongs to the weights. Images are
converted with channels last, the layout of tensor cores, and later layers keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_UNIT = 1.0 / 255.0


def convolve_images(image: Tensor, layers: nn.Sequential, dtype: torch.dtype) -> Tensor:
    """`layers(image / 255)` of uint8 images [n, channels, height, width] in any memory layout, computed in `dtype`.

    The first layer is a convolution.
    """
    first, *others = layers
    assert isinstance(first, nn.Conv2d)
    values, weight, stride = _from_bytes(image, first, dtype)
    values = nn.functional.conv2d(values, weight, first.bias, stride, first.padding)
    for layer in others:
        values = layer(values)
    return values


def _from_bytes(image: Tensor, layer: nn.Conv2d, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
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
    weight = weight.unflatten(3, (kernel, stride)).unflatten(2, (kernel, stride)).permute(0, 3, 5, 1, 2, 4)
    return _blocks(image, stride, rows, columns, dtype), weight.flatten(1, 3), 1


def _blocks(image: Tensor, stride: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The first rows × columns blocks of pixels as channels: [n, stride × stride × channels, rows, columns]."""
    blocks = (
        image[..., : rows * stride, : columns * stride].unflatten(3, (columns, stride)).unflatten(2, (rows, stride))
    )
    # One copy: [n, rows, columns, stride, stride, channels], converted.
    blocks = blocks.permute(0, 2, 4, 3, 5, 1).to(dtype, memory_format=torch.contiguous_format)
    return blocks.flatten(3).movedim(-1, 1)
