"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019) on flat parameters, one kernel per step and member.

torch.optim's Adam does the same arithmetic with the same kernel, but on a small network its overhead exceeds the
kernel's time, and its first step loads torch's compiler, which takes a second.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = (0.9, 0.999)


class FlatAdam:
    """Steps `flat` [member, parameter] along `grad`, each member with its own learning rate.

    The learning rates [member] are a tensor, so that they can change after a step was captured. The weight decay is
    added to the gradient, or, if it is `decoupled` (AdamW), shrinks the parameters by learning_rate × weight_decay.
    """

    def __init__(
        self,
        flat: Tensor,
        grad: Tensor,
        learning_rate: Tensor,
        eps: float,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ) -> None:
        self.flat, self.grad, self.learning_rate = flat.detach(), grad, learning_rate
        self.eps, self.betas, self.weight_decay = eps, betas, weight_decay
        self._fused_step = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self.mean = torch.zeros_like(self.flat)  # of the gradient
        self.square = torch.zeros_like(self.flat)  # mean of its square
        self.steps = torch.zeros(len(flat), device=flat.device)  # [member]
        tensors = self.flat, self.grad, self.mean, self.square, self.steps, self.learning_rate
        self._members = list(zip(*(tensor.unbind() for tensor in tensors), strict=True))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step, except for members whose `skip` [member] is 1; `skip` is only read on the device."""
        beta1, beta2 = self.betas
        self.steps.add_(1.0 if skip is None else 1.0 - skip)
        for member, (flat, grad, mean, square, steps, learning_rate) in enumerate(self._members):
            self._fused_step(
                [flat],
                [grad],
                [mean],
                [square],
                [],
                [steps],
                lr=learning_rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None if skip is None else skip[member],
            )

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return {"mean": self.mean, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])
