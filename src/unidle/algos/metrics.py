"""What an update reports."""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor | float]  # tensors with one element (one member); a number where the host knows it


def stacked(metrics: Metrics) -> Tensor:
    """[metric] the values, on the device of the tensors."""
    tensors = [value for value in metrics.values() if isinstance(value, Tensor)]
    if all(tensor.is_cpu for tensor in tensors):  # the same, in a third of the time
        numbers = [float(value.detach() if isinstance(value, Tensor) else value) for value in metrics.values()]
        return torch.tensor(numbers, dtype=torch.float32)
    device = tensors[0].device
    return torch.cat(
        [
            value.detach().float().view(1) if isinstance(value, Tensor) else torch.full((1,), value, device=device)
            for value in metrics.values()
        ]
    )
