"""The image encoder: shapes, channel order, layers and initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unidle.nn.cnn import ImageEncoder
from unidle.spaces.observations import image_axes


def image_encoder(shape: tuple[int, ...], kind: str = "nature") -> ImageEncoder:
    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    return ImageEncoder(shape, *axes, kind)


def random_images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(84, 84, 4), (3, 40, 64), (36, 36), (12, 35, 3), (2, 8, 8), (8, 8), (10, 9, 1)])
def test_images_of_any_shape_give_512_features(shape: tuple[int, ...]) -> None:
    encoder = image_encoder(shape)
    features = encoder(random_images(2, 3, *shape))
    assert features.shape == (2, 3, 512)
    assert torch.isfinite(features).all()


@pytest.mark.parametrize(("height", "width"), [(40, 44), (9, 12)])
def test_channels_first_and_last_give_same_features(height: int, width: int) -> None:
    first, last = image_encoder((3, height, width)), image_encoder((height, width, 3))
    last.load_state_dict(first.state_dict())
    images = random_images(4, 3, height, width)
    torch.testing.assert_close(last(images.movedim(1, -1)), first(images))


@pytest.mark.parametrize("size", [40, 9])
def test_image_without_channel_axis_has_one_channel(size: int) -> None:
    flat, with_channel = image_encoder((size, size)), image_encoder((1, size, size))
    with_channel.load_state_dict(flat.state_dict())
    images = random_images(4, size, size)
    torch.testing.assert_close(flat(images), with_channel(images.unsqueeze(1)))


def test_large_images_get_nature_dqn_layers() -> None:
    encoder = image_encoder((84, 84, 4))
    layers = [layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in layers] == [
        (4, 32, 8, 4),
        (32, 64, 4, 2),
        (64, 64, 3, 1),
    ]
    assert encoder.project[0].in_features == 64 * 7 * 7


def test_pixels_are_scaled_to_unit_range() -> None:
    encoder = image_encoder((8, 8))
    white = torch.full((1, 8, 8), 255, dtype=torch.uint8)
    expected = encoder.project(encoder.convolutions(torch.ones(1, 1, 8, 8)))
    torch.testing.assert_close(encoder(white), expected)


def test_initial_convolutions_have_gain_sqrt_2() -> None:
    kernel = image_encoder((84, 84, 4)).convolutions[0].weight.flatten(1)
    torch.testing.assert_close(kernel @ kernel.T, 2 * torch.eye(32), atol=1e-5, rtol=0)
    assert math.isclose(kernel.norm(dim=1).mean().item(), math.sqrt(2), rel_tol=1e-5)


# -- IMPALA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(84, 84, 4), (3, 40, 64), (36, 36), (2, 8, 8), (10, 9, 1)])
def test_impala_gives_256_features_of_images_of_any_shape(shape: tuple[int, ...]) -> None:
    encoder = image_encoder(shape, "impala")
    features = encoder(random_images(2, 3, *shape))
    assert encoder.n_features == 256
    assert features.shape == (2, 3, 256)
    assert torch.isfinite(features).all()


def test_impala_has_the_parameters_of_the_paper() -> None:
    """Three blocks of five 3×3 convolutions with 16, 32 and 32 channels; 84 pixels are pooled to 42, 21 and 11."""

    def convolution(inputs: int, outputs: int) -> int:
        return 9 * inputs * outputs + outputs

    blocks = zip((4, 16, 32), (16, 32, 32))
    expected = sum(convolution(inputs, outputs) + 4 * convolution(outputs, outputs) for inputs, outputs in blocks)
    expected += 32 * 11 * 11 * 256 + 256
    encoder = image_encoder((84, 84, 4), "impala")
    assert sum(parameter.numel() for parameter in encoder.parameters()) == expected


def test_impala_computes_its_formula() -> None:
    encoder = image_encoder((2, 12, 15), "impala").double()
    weights = encoder.state_dict()
    images = random_images(3, 2, 12, 15)

    def convolve(values: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.conv2d(values, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    values = images.double() / 255
    for block in range(3):
        first = f"convolutions.{4 * block}"
        padded = nn.functional.pad(convolve(values, first), (1, 1, 1, 1), value=-torch.inf)
        values = padded.unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))  # the maximum of every second 3 × 3 window
        for residual in (1, 2):
            name = f"convolutions.{4 * block + residual + 1}"
            hidden = convolve(values.clamp(min=0), f"{name}.first").clamp(min=0)
            values = values + convolve(hidden, f"{name}.second")
    dense = values.clamp(min=0).flatten(1) @ weights["project.0.weight"].T + weights["project.0.bias"]
    found = encoder.project(encoder.convolutions(images.double() / 255))
    torch.testing.assert_close(found, dense.clamp(min=0))


def test_residual_block_does_not_change_its_input() -> None:
    residual = image_encoder((8, 8, 3), "impala").convolutions[2]
    values = torch.randn(2, 16, 5, 5)
    before = values.clone()
    residual(values)
    assert torch.equal(values, before)
