"""What a simulator logs with its steps (`extras["log"]` of Isaac Lab and mjlab), as metrics of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PREFIX = "Episode/"  # of names without a group, as in RSL-RL


class StepLog:
    """Keeps the values of each step, and averages each over the steps that had it.

    Adding them does not synchronise: tensors stay on their device until `take`.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep the values of one step."""
        if values:
            self._steps.append(dict(values))  # a copy: simulators add to the same dict in the next step

    def take(self) -> dict[str, float]:
        """The mean of each value since the last call; waits for the device once."""
        values: dict[str, list[Tensor]] = {}
        for step in self._steps:
            for name, value in step.items():
                if isinstance(value, Tensor | float | int) and (not isinstance(value, Tensor) or value.numel()):
                    values.setdefault(name, []).append(torch.as_tensor(value, dtype=torch.float32).reshape(-1))
        self._steps.clear()
        if not values:
            return {}
        devices = [part.device for parts in values.values() for part in parts]
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        means = torch.stack([torch.cat([part.to(device) for part in parts]).mean() for parts in values.values()])
        named = zip(values, means.tolist())
        return {name if "/" in name else _PREFIX + name: mean for name, mean in named if math.isfinite(mean)}
