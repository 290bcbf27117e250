"""Adam (Kingma & Ba 2015) on one flat tensor, one kernel per step.

torch.optim's Adam does the same arithmetic through the same kernel, but on a small network its bookkeeping costs more
than the kernel does, and its first step loads torch's compiler, which takes a second.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETA1, BETA2 = 0.9, 0.999


class FlatAdam:
    """Steps `flat` along `grad`. The learning rate is a tensor, so that a captured step sees it change."""

    betas = (BETA1, BETA2)

    def __init__(self, flat: Tensor, grad: Tensor, learning_rate: Tensor, eps: float) -> None:
        self.flat, self.grad, self.learning_rate, self.eps = flat.detach(), grad, learning_rate, eps
        self.mean = torch.zeros_like(self.flat)  # of the gradient
        self.square = torch.zeros_like(self.flat)  # mean of its square
        self.steps = torch.zeros((), device=flat.device)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step; where `skip` is 1 nothing changes, decided on the device."""
        self.steps.add_(1.0 if skip is None else 1.0 - skip)
        torch._fused_adam_(
            [self.flat],
            [self.grad],
            [self.mean],
            [self.square],
            [],
            [self.steps],
            lr=self.learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=skip,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"mean": self.mean, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])
