"""The image encoder: shapes, channel order, layers and initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unidle.nn.cnn import ImageEncoder
from unidle.spaces.observations import image_axes


def image_encoder(shape: tuple[int, ...]) -> ImageEncoder:
    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    return ImageEncoder(shape, *axes)


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
