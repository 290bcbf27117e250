from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from unidle.nn.optim.flat_parameters import FlatParameters


class Net(nn.Module):
    """A few layers of odd sizes, one parameter without entries and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def loss(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).square().sum() + self.empty.sum()


def gradients(module: nn.Module) -> Tensor:
    """What torch left in .grad, one after the other, 0 where it left nothing."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def gradients_by_place(flat: FlatParameters, module: nn.Module) -> Tensor:
    """The same from the flat gradient: each parameter's part lies where the parameter lies in the flat tensor."""
    parts = []
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.numel():
            start = (parameter.data_ptr() - flat.flat.data_ptr()) // 4
            parts.append(flat.grad[start : start + parameter.numel()])
    return torch.cat(parts)


@pytest.fixture
def pair() -> tuple[Net, Net, FlatParameters, Tensor]:
    """A plain net, its twin with flat parameters, and an input."""
    torch.manual_seed(0)
    plain = Net()
    twin = copy.deepcopy(plain)
    return plain, twin, FlatParameters(twin), torch.randn(20, 3)


def test_taking_over_changes_no_value(pair: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    plain, twin, _, inputs = pair
    assert torch.equal(twin.body(inputs), plain.body(inputs))
    for name, value in plain.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)


def test_gradients_are_those_of_torch_and_zero_where_the_loss_does_not_reach(
    pair: tuple[Net, Net, FlatParameters, Tensor],
) -> None:
    plain, twin, flat, inputs = pair
    flat.grad.fill_(7.0)
    flat.backward(twin.loss(inputs))
    plain.loss(inputs).backward()
    assert torch.equal(gradients_by_place(flat, twin), gradients(plain))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_that_of_torch(pair: tuple[Net, Net, FlatParameters, Tensor], max_norm: float) -> None:
    plain, twin, flat, inputs = pair
    flat.backward(twin.loss(inputs))
    flat_before = flat.grad.clone()
    norm = flat.clip_(max_norm)
    plain.loss(inputs).backward()
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(gradients_by_place(flat, twin), gradients(plain))
    assert torch.equal(flat.grad, flat_before) == (max_norm > 1e5)


def test_adam_on_the_flat_tensor_moves_the_module_as_adam_on_its_parameters_would(
    pair: tuple[Net, Net, FlatParameters, Tensor],
) -> None:
    plain, twin, flat, inputs = pair
    ours, theirs = torch.optim.Adam([flat.flat], lr=0.1), torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(5):
        flat.backward(twin.loss(inputs))
        flat.clip_(1.0)
        ours.step()
        theirs.zero_grad()
        plain.loss(inputs).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, msg=name)
    assert not torch.equal(twin.body[0].weight, Net().body[0].weight)


def test_every_parameter_is_an_aligned_view_of_the_flat_tensor(pair: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    _, twin, flat, _ = pair
    start, end = flat.flat.data_ptr(), flat.flat.data_ptr() + flat.flat.numel() * 4
    trained = [p for p in twin.parameters() if p.requires_grad and p.numel()]
    assert all(start <= p.data_ptr() < end and (p.data_ptr() - start) % 256 == 0 for p in trained)
    assert not start <= twin.frozen.data_ptr() < end


def test_a_state_dict_loads_into_the_flat_tensor_in_place(pair: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    _, twin, flat, inputs = pair
    other = Net()
    places = [p.data_ptr() for p in twin.parameters()]
    twin.load_state_dict(other.state_dict())
    assert [p.data_ptr() for p in twin.parameters()] == places
    weight = other.body[2].weight
    start = (twin.body[2].weight.data_ptr() - flat.flat.data_ptr()) // 4
    assert torch.equal(flat.flat[start : start + weight.numel()].view_as(weight), weight)
    assert torch.equal(twin.body(inputs), other.body(inputs))
    # and a checkpoint of the module is worth the same in a module that is not flat
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in twin.state_dict().items())
