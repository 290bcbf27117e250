"""Random streams that depend on a key alone."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from unidle.rng import DrawingFrom, preserved_random_state


def draw_everything() -> list[torch.Tensor]:
    """One draw by each function that a network may be initialised with."""
    layers = [nn.Linear(5, 33), nn.LSTMCell(33, 16), nn.Embedding(7, 5), nn.Conv2d(3, 8, 3), nn.Bilinear(3, 4, 5)]
    nn.init.orthogonal_(layers[0].weight)
    nn.init.trunc_normal_(layers[2].weight)
    nn.init.xavier_normal_(layers[3].weight)
    nn.init.kaiming_uniform_(layers[4].weight)
    nn.init.normal_(layers[1].weight_hh)
    weights = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    return [
        *weights,
        *(torch.randn(17), torch.rand(5), torch.randn_like(weights[0]), torch.rand_like(weights[1])),
        *(torch.randint(5, (3,)), torch.randint(1, 5, (3,)), torch.randperm(9), torch.normal(torch.zeros(5), 1.0)),
        *(torch.normal(0.0, 1.0, (3,)), torch.bernoulli(torch.full((4,), 0.5)), torch.multinomial(torch.ones(5), 2)),
        *(torch.empty(3).exponential_(), torch.empty(20).normal_(), torch.empty(3).uniform_()),
    ]


def test_draws_equal_those_of_seeded_global_generator() -> None:
    torch.manual_seed(3)
    expected, state_after = draw_everything(), torch.get_rng_state()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    with DrawingFrom(generator):
        drawn = draw_everything()
    assert all(torch.equal(*pair) for pair in zip(drawn, expected, strict=True))
    assert torch.equal(generator.get_state(), state_after)
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_given_by_caller_is_used() -> None:
    with DrawingFrom(torch.Generator().manual_seed(3)):
        drawn = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(5)))


@pytest.mark.gpu
def test_draws_on_other_devices_are_left_alone() -> None:
    with DrawingFrom(torch.Generator().manual_seed(3)):
        assert torch.rand(4, device="cuda").device.type == "cuda"


def draw_from_global_generators(device: str) -> list[float]:
    return [random.random(), np.random.random(), torch.rand((), device=device).item()]  # noqa: NPY002


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_seeding_within_preserved_random_state_changes_nothing_outside(device: str) -> None:
    seed_everything = (random.seed, np.random.seed, torch.manual_seed)
    for seed in seed_everything:
        seed(3)
    draw_from_global_generators(device)
    expected = draw_from_global_generators(device)
    for seed in seed_everything:
        seed(3)
    draw_from_global_generators(device)
    with contextlib.suppress(ZeroDivisionError), preserved_random_state():
        for seed in seed_everything:
            seed(4)
        assert draw_from_global_generators(device) != expected
        raise ZeroDivisionError
    assert draw_from_global_generators(device) == expected
