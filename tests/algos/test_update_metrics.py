"""Metrics of an update, from tensors and numbers to one tensor."""

from __future__ import annotations

import torch

from unidle.algos.metrics import Metrics, stacked


def test_tensors_and_numbers_are_stacked_in_order() -> None:
    metrics: Metrics = {"loss": torch.tensor([0.5]), "updates": 3.0, "finite": torch.tensor(True)}
    values = stacked(metrics)
    assert values.dtype == torch.float32
    assert values.tolist() == [0.5, 3.0, 1.0]


def test_numbers_join_tensors_of_another_device() -> None:
    """The meta device stands for a GPU: there, a number must not be read from a tensor."""
    metrics: Metrics = {"loss": torch.zeros(1, device="meta"), "updates": 3.0}
    assert stacked(metrics).shape == (2,)
