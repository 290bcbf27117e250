"""Convolutional features of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.nn.mlp import Mlp, orthogonal
from unidle.nn.pixels import convolve_images, image_kernels
from unidle.spaces.observations import has_channels_last

_N_FEATURES = {"nature": 512, "impala": 256}


class ImageEncoder(nn.Module):
    """uint8 images [.., *shape] → features [.., n_features].

    `kind` nature is the CNN of Mnih et al. 2015, or 3×3 convolutions for small images; impala is the residual network
    of Espeholt et al. 2018.
    """

    def __init__(self, shape: tuple[int, ...], channels: int, height: int, width: int, kind: str = "nature") -> None:
        super().__init__()
        self.n_features = _N_FEATURES[kind]
        self._shape = shape
        self._channels_last = has_channels_last(shape)
        layers = _impala(channels) if kind == "impala" else _nature(channels, min(height, width))
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            n_flat = self.convolutions(torch.zeros(1, *self._as_image(torch.zeros(1, *shape)).shape[1:])).shape[1]
        self.project = Mlp(orthogonal(nn.Linear(n_flat, self.n_features)), nn.ReLU())

    def _as_image(self, pixels: Tensor) -> Tensor:
        """[n, *shape] → [n, channels, height, width]"""
        if len(self._shape) == 2:
            return pixels.unsqueeze(1)
        return pixels.movedim(-1, 1) if self._channels_last else pixels

    def forward(self, pixels: Tensor) -> Tensor:
        """Scale to [0, 1] and encode; leading dimensions are kept."""
        lead = pixels.shape[: pixels.dim() - len(self._shape)]
        image = self._as_image(pixels.reshape(-1, *self._shape))
        if image.is_cuda:
            dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else torch.float32
            convolved = convolve_images(image, self.convolutions, dtype, image_kernels())
        else:
            convolved = self.convolutions(image.float() / 255.0)
        features: Tensor = self.project(convolved)
        return features.view(*lead, self.n_features)


def _nature(channels: int, side: int) -> list[nn.Module]:
    kernels = [(8, 4), (4, 2), (3, 1)] if side >= 36 else [(3, 2), (3, 1), (3, 1)]
    layers: list[nn.Module] = []
    for (kernel, stride), n_outputs in zip(kernels, (32, 64, 64)):
        padding = 0 if side >= 36 else 1
        # In place: one tensor less of the largest size.
        layers += [orthogonal(nn.Conv2d(channels, n_outputs, kernel, stride, padding)), nn.ReLU(inplace=True)]
        channels = n_outputs
    return layers


class _Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(values.relu()).relu_())
        return values + hidden


def _impala(channels: int) -> list[nn.Module]:
    """Figure 3 of Espeholt et al. 2018 (right), with PyTorch's initial weights."""
    layers: list[nn.Module] = []
    for n_outputs in (16, 32, 32):
        layers += [nn.Conv2d(channels, n_outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [_Residual(n_outputs), _Residual(n_outputs)]
        channels = n_outputs
    return [*layers, nn.ReLU(inplace=True)]
