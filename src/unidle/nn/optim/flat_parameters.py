"""All parameters of a network in one tensor, so that clipping and Adam are one kernel each, not one per layer.

The tensor is [member, parameter]: a member is one of several networks of the same shape that are trained together, each
with its own optimiser state and settings. At present a run has one member.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ALIGN = 64  # floats: every parameter starts at a multiple of 256 bytes, which fast cuBLAS kernels need


class FlatParameters:
    """Makes the parameters of modules views of one flat tensor, and collects their gradients in another."""

    def __init__(self, *members: nn.Module) -> None:
        """All members must have parameters of the same shapes, and be on their device already."""
        trained = [[p for p in module.parameters() if p.requires_grad] for module in members]
        starts, width = [], 0
        for parameter in trained[0]:
            starts.append(width)
            width += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.flat = nn.Parameter(torch.zeros(len(members), width, device=trained[0][0].device))  # [member, parameter]
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        self._parameters: list[Tensor] = []
        self._grads: list[Tensor] = []
        for row, parameters in zip(self.flat.data, trained, strict=True):
            for parameter, start in zip(parameters, starts, strict=True):
                span = slice(start, start + parameter.numel())
                row[span] = parameter.detach().reshape(-1)
                parameter.data = row[span].view_as(parameter)
                self._parameters.append(parameter)
                self._grads.append(self.grad_of(parameter))

    def grad_of(self, parameter: Tensor) -> Tensor:
        """The view of `grad` for one of the parameters."""
        start = parameter.storage_offset()
        return self.grad.view(-1)[start : start + parameter.numel()].view_as(parameter)

    def backward(self, loss: Tensor) -> None:
        """Write the gradient of `loss` to `grad`; 0 for parameters that the loss does not depend on."""
        torch._foreach_copy_(self._grads, self._gradients(loss))

    def add_gradient(self, loss: Tensor, share: float) -> None:
        """Add `share` × the gradient of `loss` to `grad`."""
        torch._foreach_add_(self._grads, self._gradients(loss), alpha=share)

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradients of `loss`, contiguous.

        Those of convolutions with channels last are not, and a single one would make torch copy all of them one by one.
        """
        grads = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        return [grad.contiguous() for grad in grads]

    def clip_(self, max_norm: Tensor) -> Tensor:
        """Clip the norm of each member's gradient to `max_norm` [member]; returns the norms before clipping."""
        norms = torch.linalg.vector_norm(self.grad, dim=1)
        largest = norms + 1e-6
        if norms.is_cpu and len(norms) == 1 and largest <= max_norm:  # all factors would be 1
            return norms
        self.grad.mul_((max_norm / largest).clamp(max=1.0).unsqueeze(1))
        return norms
