"""Stochastic gradient descent and RMSprop (Hinton 2012) on flat parameters, with the arithmetic of torch.optim.

All members [member, parameter] step in the same operations, which neither wait for the device nor branch on a value.
The learning rates [member] are a tensor, so that they can change after a step was captured.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FlatSGD:
    """Steps `flat` along the gradient, or with momentum m along v ← m v + gradient."""

    def __init__(
        self, flat: Tensor, grad: Tensor, learning_rate: Tensor, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        """`weight_decay` × the parameters is added to the gradient."""
        self.flat, self.grad, self.learning_rate = flat.detach(), grad, learning_rate
        self.momentum, self.weight_decay = momentum, weight_decay
        self.velocity = torch.zeros_like(self.flat) if momentum else None

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step, except for members whose `skip` [member] is 1; `skip` is only read on the device."""
        self.step_along(_decayed(self.grad, self.flat, self.weight_decay), skip)

    def step_along(self, direction: Tensor, skip: Tensor | None) -> None:
        """One step along `direction` instead of the gradient."""
        if self.velocity is not None:
            direction = self.momentum * self.velocity + direction
            _assign(self.velocity, direction, skip)
        _assign(self.flat, self.flat - self.learning_rate.unsqueeze(1) * direction, skip)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {} if self.velocity is None else {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


class FlatRMSprop:
    """SGD along gradient / (√s + ε), where s is the running mean of the squared gradient with decay α."""

    def __init__(
        self,
        flat: Tensor,
        grad: Tensor,
        learning_rate: Tensor,
        eps: float,
        alpha: float = 0.99,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        """`weight_decay` × the parameters is added to the gradient."""
        self.sgd = FlatSGD(flat, grad, learning_rate, momentum)
        self.eps, self.alpha, self.weight_decay = eps, alpha, weight_decay
        self.square = torch.zeros_like(self.sgd.flat)  # s

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step, except for members whose `skip` [member] is 1; `skip` is only read on the device."""
        grad = _decayed(self.sgd.grad, self.sgd.flat, self.weight_decay)
        square = self.alpha * self.square + (1 - self.alpha) * grad.square()
        _assign(self.square, square, skip)
        self.sgd.step_along(grad / (square.sqrt() + self.eps), skip)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"square": self.square, **self.sgd.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


def _decayed(grad: Tensor, flat: Tensor, weight_decay: float) -> Tensor:
    return grad + weight_decay * flat if weight_decay else grad


def _assign(tensor: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Set `tensor` to `value`, except for members that skip; not by a product with 0, which would keep NaN."""
    tensor.copy_(value if skip is None else torch.where(skip.unsqueeze(1) > 0, tensor, value))
