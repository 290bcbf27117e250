"""Convolutional features of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.nn.mlp import Mlp, orthogonal
from unidle.nn.pixels import convolve_images


class ImageEncoder(nn.Module):
    """uint8 images [.., *shape] → features [.., 512]; the Nature CNN, or 3×3 convolutions for small images."""

    n_features = 512

    def __init__(self, shape: tuple[int, ...], channels: int, height: int, width: int) -> None:
        super().__init__()
        self._shape = shape
        self._channels_last = len(shape) == 3 and shape[2] == channels and shape[0] != channels
        self.convolutions = nn.Sequential(*_nature(channels, min(height, width)), nn.Flatten())
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
            convolved = convolve_images(image, self.convolutions, dtype)
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
