"""Every optimiser on flat parameters against torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unidle.config import Recipe, recipe_for
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.optimiser import Optimiser, fused_step_unsupported, new_optimiser

RATE = 3e-3
SETTINGS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": ({}, torch.optim.Adam, {"eps": 1e-5}),
    "adam with betas and decay": (
        {"adam_betas": (0.5, 0.99), "weight_decay": 0.1},
        torch.optim.Adam,
        {"eps": 1e-5, "betas": (0.5, 0.99), "weight_decay": 0.1},
    ),
    "adamw": ({"optimizer": "adamw"}, torch.optim.AdamW, {"eps": 1e-5}),
    "adamw with decay": (
        {"optimizer": "adamw", "weight_decay": 0.3},
        torch.optim.AdamW,
        {"eps": 1e-5, "weight_decay": 0.3},
    ),
    "rmsprop": ({"optimizer": "rmsprop"}, torch.optim.RMSprop, {"eps": 1e-5}),
    "rmsprop with everything": (
        {"optimizer": "rmsprop", "rmsprop_alpha": 0.9, "momentum": 0.8, "weight_decay": 0.1},
        torch.optim.RMSprop,
        {"eps": 1e-5, "alpha": 0.9, "momentum": 0.8, "weight_decay": 0.1},
    ),
    "sgd": ({"optimizer": "sgd"}, torch.optim.SGD, {}),
    "sgd with everything": (
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
}
every_optimiser = pytest.mark.parametrize("name", SETTINGS)


def recipe_of(name: str) -> Recipe:
    return recipe_for("ppo", adam_eps=1e-5, **SETTINGS[name][0])


class Trained:
    """Members of ten parameters, and their optimiser."""

    def __init__(self, name: str, start: Tensor, rates: Tensor) -> None:
        nets = [torch.nn.Linear(3, 2) for _ in start]
        self.parameters = FlatParameters(*nets)
        self.parameters.flat.data.zero_()
        self.flat = self.parameters.flat.data
        self.flat[:, : start.shape[1]] = start
        self.optimiser: Optimiser = new_optimiser(recipe_of(name), self.parameters, rates)

    def step(self, grad: Tensor, skip: Tensor | None = None) -> None:
        self.parameters.grad.zero_()
        self.parameters.grad[:, : grad.shape[1]] = grad
        self.optimiser.step(skip)


@every_optimiser
def test_steps_match_torch_update_for_update(name: str) -> None:
    _, reference_class, arguments = SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    start, rate = torch.randn(1, 8, generator=generator), torch.tensor([RATE])
    ours, theirs = Trained(name, start, rate), torch.nn.Parameter(start.clone())
    reference = reference_class([theirs], lr=RATE, **arguments)
    for step in range(30):
        rate.fill_(RATE / (1 + 0.1 * step))
        reference.param_groups[0]["lr"] = float(rate)
        theirs.grad = torch.randn(1, 8, generator=generator)
        ours.step(theirs.grad)
        reference.step()
        torch.testing.assert_close(ours.flat[:, :8], theirs.detach(), rtol=1e-6, atol=1e-6)
    assert not ours.flat[:, 8:].any()  # the padding stays 0


@every_optimiser
def test_skipped_step_changes_nothing_even_with_nan_gradient(name: str) -> None:
    start = torch.linspace(-1, 1, 8).repeat(2, 1)
    trained = Trained(name, start, torch.full((2,), RATE))
    trained.step(torch.ones(2, 8))
    before = [trained.flat.clone(), *(value.clone() for value in trained.optimiser.state_dict().values())]
    grad = torch.ones(2, 8)
    grad[0] = float("nan")
    trained.step(grad, skip=torch.tensor([1.0, 0.0]))
    after = [trained.flat, *trained.optimiser.state_dict().values()]
    for old, new in zip(before, after):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1], new[1])
        assert torch.isfinite(new).all()


@every_optimiser
def test_loaded_optimiser_continues_bit_for_bit(name: str) -> None:
    grads, rate = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([RATE])
    whole, first = Trained(name, torch.ones(1, 8), rate), Trained(name, torch.ones(1, 8), rate)
    for grad in grads:
        whole.step(grad)
    for grad in grads[:3]:
        first.step(grad)
    second = Trained(name, first.flat[:, :8], rate)
    addresses = [value.data_ptr() for value in second.optimiser.state_dict().values()]
    second.optimiser.load_state_dict({key: value.clone() for key, value in first.optimiser.state_dict().items()})
    assert [value.data_ptr() for value in second.optimiser.state_dict().values()] == addresses
    for grad in grads[3:]:
        second.step(grad)
    assert torch.equal(whole.flat, second.flat)


@every_optimiser
def test_members_step_with_their_own_learning_rates(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    start, rates = torch.randn(3, 8, generator=generator), torch.tensor([3e-3, 1e-2, 1e-4])
    together = Trained(name, start, rates)
    alone = [Trained(name, start[member : member + 1], rates[member : member + 1]) for member in range(3)]
    for _ in range(4):
        grad = torch.randn(3, 8, generator=generator)
        together.step(grad)
        for member, own in enumerate(alone):
            own.step(grad[member : member + 1])
    for member, own in enumerate(alone):
        assert torch.equal(together.flat[member], own.flat[0])


@pytest.mark.gpu
@every_optimiser
def test_captured_step_reads_learning_rate_and_skip_from_the_device(name: str) -> None:
    rate, skip = torch.full((1,), RATE, device="cuda"), torch.zeros(1, device="cuda")
    net = torch.nn.Linear(3, 2, device="cuda")
    expected_net = torch.nn.Linear(3, 2, device="cuda")
    expected_net.load_state_dict(net.state_dict())
    captured, expected = FlatParameters(net), FlatParameters(expected_net)
    optimiser = new_optimiser(recipe_of(name), captured, rate)
    reference = new_optimiser(recipe_of(name), expected, rate)
    tensors = [captured.flat.data, *optimiser.state_dict().values()]
    before = [tensor.clone() for tensor in tensors]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimiser.step(skip)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimiser.step(skip)
    for tensor, value in zip(tensors, before):
        tensor.copy_(value)
    for step in range(6):
        rate.fill_(RATE / (step + 1))
        skip.fill_(float(step == 3))
        captured.grad.normal_()
        expected.grad.copy_(captured.grad)
        graph.replay()
        reference.step(skip)
    torch.testing.assert_close(captured.flat, expected.flat, rtol=1e-6, atol=1e-7)


def test_kernels_that_fuse_adam_decline_other_optimisers() -> None:
    reasons = {name: fused_step_unsupported(recipe_of(name)) for name in SETTINGS}
    decay = "the weight decay is not 0: kernels take none"
    assert reasons == {
        "adam": None,
        "adam with betas and decay": decay,
        "adamw": decay,
        "adamw with decay": decay,
        **dict.fromkeys(["rmsprop", "rmsprop with everything"], "the optimiser is rmsprop: kernels take adam"),
        **dict.fromkeys(["sgd", "sgd with everything"], "the optimiser is sgd: kernels take adam"),
    }
    assert fused_step_unsupported(recipe_for("ppo", optimizer="adamw", weight_decay=0.0)) is None
    assert fused_step_unsupported(recipe_for("ppo", adam_betas=(0.0, 0.99))) == "one of adam_betas is 0"


def test_default_optimiser_is_plain_adam() -> None:
    trained = Trained("adam", torch.zeros(1, 8), torch.tensor([RATE]))
    assert isinstance(trained.optimiser, FlatAdam)
    assert (trained.optimiser.betas, trained.optimiser.weight_decay) == ((0.9, 0.999), 0.0)
