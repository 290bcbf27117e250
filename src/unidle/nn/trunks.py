"""Multi-layer perceptrons, convolutions for pictures, and recurrent cores, all with orthogonal initialisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def orthogonal(layer: _Layer, gain: float = math.sqrt(2)) -> _Layer:
    """`layer` with orthogonal weights of that gain and no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@functools.cache
def _fused_layers() -> dict[type[nn.Module], Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Activation → a layer that ends in it with fewer kernels, on a GPU."""
    try:
        from unidle.nn.activated_linear import linear_relu, linear_tanh

        one = torch.ones(1, 1, device="cuda", requires_grad=True)
        linear_tanh(one, one, one[0]).backward()
    except Exception:  # torch comes without Triton on some platforms, and Triton finds no C compiler on others
        return {}
    return {nn.Tanh: linear_tanh, nn.ReLU: linear_relu}


def has_own_kernels() -> bool:
    """Whether unidle's own kernels of linear layers run on the GPU here."""
    return bool(_fused_layers())


class Mlp(nn.Sequential):
    """Linear layers, an activation after each."""

    def forward(self, values: Tensor) -> Tensor:
        """[.., inputs] → [.., outputs]"""
        learns = values.is_cuda and torch.is_grad_enabled()  # what is fused is the way back
        layer = _fused_layers().get(type(self[1])) if len(self) and learns else None
        flat = values.reshape(-1, values.shape[-1])  # a linear layer takes a detour with more dimensions
        if layer is None:
            flat = super().forward(flat)
        else:
            for linear in self:
                if isinstance(linear, nn.Linear):
                    flat = layer(flat, linear.weight, linear.bias)
        return flat.view(*values.shape[:-1], flat.shape[-1])


def mlp(n_inputs: int, widths: tuple[int, ...], activation: str, *, orthogonally: bool = True) -> Mlp:
    """Linear layers of these widths, an activation after each; their weights begin orthogonal, or as torch's do."""
    layers: list[nn.Module] = []
    for width in widths:
        linear = nn.Linear(n_inputs, width)
        layers += [orthogonal(linear) if orthogonally else linear, ACTIVATIONS[activation]()]
        n_inputs = width
    return Mlp(*layers)


class PictureEncoder(nn.Module):
    """uint8 pictures [.., *shape] → features [.., 512]; the Nature DQN's layers, or 3×3 ones where they do not fit."""

    n_features = 512

    def __init__(self, shape: tuple[int, ...], channels: int, height: int, width: int) -> None:
        super().__init__()
        self._shape = shape
        self._channels_last = len(shape) == 3 and shape[2] == channels and shape[0] != channels
        kernels = [(8, 4), (4, 2), (3, 1)] if min(height, width) >= 36 else [(3, 2), (3, 1), (3, 1)]
        layers: list[nn.Module] = []
        for (kernel, stride), n_outputs in zip(kernels, (32, 64, 64)):
            padding = 0 if kernel > 3 or min(height, width) >= 36 else 1
            layers += [orthogonal(nn.Conv2d(channels, n_outputs, kernel, stride, padding)), nn.ReLU()]
            channels = n_outputs
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            n_flat = self.convolutions(torch.zeros(1, *self._as_picture(torch.zeros(1, *shape)).shape[1:])).shape[1]
        self.project = nn.Sequential(orthogonal(nn.Linear(n_flat, self.n_features)), nn.ReLU())

    def _as_picture(self, pixels: Tensor) -> Tensor:
        """[n, *shape] → [n, channels, height, width]"""
        if len(self._shape) == 2:
            return pixels.unsqueeze(1)
        return pixels.movedim(-1, 1) if self._channels_last else pixels

    def forward(self, pixels: Tensor) -> Tensor:
        """Scale to [0, 1] and encode, keeping leading dimensions."""
        lead = pixels.shape[: pixels.dim() - len(self._shape)]
        picture = self._as_picture(pixels.reshape(-1, *self._shape)).float() / 255.0
        features: Tensor = self.project(self.convolutions(picture))
        return features.view(*lead, self.n_features)


class RecurrentCore(nn.Module):
    """A GRU or LSTM cell whose whole state is one tensor [n, state_size], zeroed where an episode starts."""

    def __init__(self, kind: Literal["gru", "lstm"], n_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.is_lstm = kind == "lstm"
        self.state_size = 2 * size if self.is_lstm else size
        self.cell = nn.LSTMCell(n_inputs, size) if self.is_lstm else nn.GRUCell(n_inputs, size)
        for name, weight in self.cell.named_parameters():
            nn.init.orthogonal_(weight) if "weight" in name else nn.init.zeros_(weight)

    def step(self, features: Tensor, state: Tensor) -> Tensor:
        """Features [n, F], state [n, S] → state [n, S] after them; its first `size` entries are the output."""
        if self.is_lstm:
            return torch.cat(self.cell(features, tuple(state.split(self.size, -1))), -1)
        after: Tensor = self.cell(features, state)
        return after

    def forward(self, features: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """Sequences [n, L, F] with episode starts [n, L] from `state` [n, S] → outputs [n, L, size]."""
        keep = 1.0 - starts.to(features.dtype)
        outputs = []
        for t in range(features.shape[1]):
            state = self.step(features[:, t], state * keep[:, t, None])
            outputs.append(state[:, : self.size])
        return torch.stack(outputs, 1)
