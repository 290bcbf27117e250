"""The first convolution from bytes: the plain formula's values and gradients, in one conversion, channels last."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unidle.nn.cnn import ImageEncoder
from unidle.nn.pixels import ImageKernels, convolve_images, image_kernels
from unidle.spaces.observations import image_axes

# Kernel, stride and padding: whole blocks, more than two blocks, no whole blocks, padding, no stride.
LAYERS = [(8, 4, 0), (6, 2, 0), (4, 2, 0), (3, 2, 0), (4, 2, 1), (3, 1, 1), (2, 2, 0)]


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(
    layer=st.sampled_from(LAYERS),
    channels=st.integers(1, 4),
    height=st.integers(8, 23),
    width=st.integers(8, 23),
    is_channels_last=st.booleans(),
)
def test_values_and_gradients_are_those_of_plain_formula(
    layer: tuple[int, int, int], channels: int, height: int, width: int, is_channels_last: bool
) -> None:
    torch.manual_seed(height * width)
    convolution = nn.Conv2d(channels, 5, *layer).double()
    image = random_images(2, channels, height, width, seed=width)
    if is_channels_last:
        image = image.movedim(1, -1).contiguous().movedim(-1, 1)
    plain, ours = convolution(image.double() / 255), convolve_images(image, nn.Sequential(convolution), torch.float64)
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)
    weighting = torch.randn_like(plain)
    for found, expected in zip(
        *(torch.autograd.grad((y * weighting).sum(), convolution.parameters()) for y in (ours, plain))
    ):
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_bytes_are_exact_in_bfloat16() -> None:
    convolution = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(convolution.weight, 255.0)  # 255 / 255 is 1
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = convolve_images(every_byte, nn.Sequential(convolution), torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == list(range(256))


class FloatSizes(TorchDispatchMode):
    """Records the number of elements of every floating-point tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = {value.data_ptr() for value in args if isinstance(value, Tensor)}
        if isinstance(out, Tensor) and out.is_floating_point() and out.data_ptr() not in given:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84), (12, 12, 3)])
def test_image_is_converted_in_one_operation(shape: tuple[int, ...]) -> None:
    axes = image_axes(shape)
    assert axes is not None
    encoder, images = ImageEncoder(shape, *axes), random_images(3, *shape)
    image = images.movedim(-1, 1) if shape[0] > shape[2] else images
    with FloatSizes() as created:
        convolve_images(image, encoder.convolutions, torch.float32)
    assert created.sizes.count(images.numel()) == 1
    with FloatSizes() as plain:
        encoder(images)
    assert plain.sizes.count(images.numel()) == 2  # to floats, and divided


@pytest.mark.parametrize("kind", ["nature", "impala"])
@pytest.mark.parametrize("shape", [(84, 84, 4), (3, 50, 41), (40, 36), (12, 35, 3), (2, 8, 8)])
def test_encoder_with_channels_last_gives_features_and_gradients_of_plain_one(
    shape: tuple[int, ...], kind: str
) -> None:
    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    encoder = ImageEncoder(shape, *axes, kind).double()
    image = random_images(4, *axes)
    plain = encoder.convolutions(image.double() / 255)
    fast = convolve_images(image, encoder.convolutions, torch.float64)
    torch.testing.assert_close(fast, plain, atol=1e-12, rtol=1e-12)
    weighting = torch.randn_like(plain)
    parameters = list(encoder.convolutions.parameters())
    for found, expected in zip(*(torch.autograd.grad((y * weighting).sum(), parameters) for y in (fast, plain))):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("shape", [(84, 84, 4), (12, 12, 3)])
def test_layers_after_first_convolution_keep_channels_last(shape: tuple[int, ...]) -> None:
    axes = image_axes(shape)
    assert axes is not None
    encoder = ImageEncoder(shape, *axes)
    layouts: list[bool] = []
    for layer in encoder.convolutions:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(
                lambda module, inputs, out: layouts.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    convolve_images(random_images(2, *axes), encoder.convolutions, torch.float32)
    assert layouts == [True, True, True]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on the CPU, in the interpreter")
@pytest.mark.parametrize("shape", [(36, 40, 4), (3, 37, 45), (2, 8, 8)])
def test_kernels_give_features_and_gradients_of_plain_encoder(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.image_convolution import convolution_relu, image_blocks

    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    encoder, image = ImageEncoder(shape, *axes), random_images(2, *axes)
    plain = encoder.convolutions(image.float() / 255)
    kernels = ImageKernels(image_blocks, convolution_relu)
    fused = convolve_images(image, encoder.convolutions, torch.float32, kernels)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    weighting, parameters = torch.randn_like(plain), list(encoder.convolutions.parameters())
    for found, expected in zip(*(torch.autograd.grad((y * weighting).sum(), parameters) for y in (fused, plain))):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_kernels_work_on_this_gpu() -> None:
    assert image_kernels() is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("in_bf16", "tolerance"), [(False, 6e-3), (True, 5e-2)])
@pytest.mark.parametrize("kind", ["nature", "impala"])
@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84), (12, 12, 3)])
def test_features_on_gpu_are_those_on_cpu(shape: tuple[int, ...], kind: str, in_bf16: bool, tolerance: float) -> None:
    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    encoder, images = ImageEncoder(shape, *axes, kind), random_images(16, *shape)
    expected = encoder(images)
    encoder.cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=in_bf16, cache_enabled=False):
        found = encoder(images.cuda()).float().cpu()
    assert ((found - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels work on a GPU")
def test_kernels_that_do_not_work_are_reported() -> None:
    image_kernels.cache_clear()
    with pytest.warns(
        RuntimeWarning, match="Image convolutions uses the plain PyTorch implementation, which is slower"
    ):
        assert image_kernels() is None
    image_kernels.cache_clear()
