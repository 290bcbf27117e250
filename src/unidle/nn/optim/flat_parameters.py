"""All parameters of a module in one tensor, so that clipping and Adam are one kernel each, not one per layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ALIGN = 64  # floats: every parameter starts at a multiple of 256 bytes, as cuBLAS's fast kernels want


class FlatParameters:
    """Rebinds a module's parameters to views of one flat tensor, and collects their gradients in another."""

    def __init__(self, module: nn.Module) -> None:
        """Rebind the parameters of `module`, which must already be on its device."""
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        starts, end = [], 0
        for parameter in self._parameters:
            starts.append(end)
            end += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.flat = nn.Parameter(torch.zeros(end, device=self._parameters[0].device))
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        self._grads: list[Tensor] = []
        for parameter, start in zip(self._parameters, starts):
            span = slice(start, start + parameter.numel())
            self.flat.data[span] = parameter.detach().reshape(-1)
            parameter.data = self.flat.data[span].view_as(parameter)
            self._grads.append(self.grad_of(parameter))

    def grad_of(self, parameter: Tensor) -> Tensor:
        """The view of `grad` for one of the parameters."""
        start = parameter.storage_offset()
        return self.grad[start : start + parameter.numel()].view_as(parameter)

    def backward(self, loss: Tensor) -> None:
        """Write the gradient of `loss` to `grad`; 0 for parameters that the loss does not depend on."""
        grads = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        torch._foreach_copy_(self._grads, grads)

    def add(self, loss: Tensor, share: float) -> None:
        """Add `share` × the gradient of `loss` to `grad`."""
        grads = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        torch._foreach_add_(self._grads, grads, alpha=share)

    def clip_(self, max_norm: float) -> Tensor:
        """Clip the norm of `grad` to `max_norm`; returns the norm before clipping."""
        norm = torch.linalg.vector_norm(self.grad)
        self.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
