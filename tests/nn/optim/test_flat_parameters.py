"""Flat parameters: gradients, clipping and steps match those of separate parameters."""

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
    """All .grad tensors, concatenated; 0 where there is none."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def flat_gradients(flat: FlatParameters, module: nn.Module) -> Tensor:
    """The same from the flat gradient, at each parameter's offset in the flat tensor."""
    parts = []
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.numel():
            start = (parameter.data_ptr() - flat.flat.data_ptr()) // 4
            parts.append(flat.grad.view(-1)[start : start + parameter.numel()])
    return torch.cat(parts)


@pytest.fixture
def nets() -> tuple[Net, Net, FlatParameters, Tensor]:
    """A plain net, its copy with flat parameters, these parameters, and an input."""
    torch.manual_seed(0)
    plain = Net()
    flattened = copy.deepcopy(plain)
    return plain, flattened, FlatParameters(flattened), torch.randn(20, 3)


def test_flattening_changes_no_values(nets: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    plain, flattened, _, inputs = nets
    assert torch.equal(flattened.body(inputs), plain.body(inputs))
    for name, value in plain.state_dict().items():
        assert torch.equal(flattened.state_dict()[name], value)


def test_gradients_match_torch_and_are_zero_where_unreached(
    nets: tuple[Net, Net, FlatParameters, Tensor],
) -> None:
    plain, flattened, flat, inputs = nets
    flat.grad.fill_(7.0)
    flat.backward(flattened.loss(inputs))
    plain.loss(inputs).backward()
    assert torch.equal(flat_gradients(flat, flattened), gradients(plain))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_matches_torch(nets: tuple[Net, Net, FlatParameters, Tensor], max_norm: float) -> None:
    plain, flattened, flat, inputs = nets
    flat.backward(flattened.loss(inputs))
    flat_before = flat.grad.clone()
    (norm,) = flat.clip_(torch.tensor([max_norm]))
    plain.loss(inputs).backward()
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(flat_gradients(flat, flattened), gradients(plain))
    assert torch.equal(flat.grad, flat_before) == (max_norm > 1e5)


def test_adam_on_flat_tensor_matches_adam_on_parameters(
    nets: tuple[Net, Net, FlatParameters, Tensor],
) -> None:
    plain, flattened, flat, inputs = nets
    ours, theirs = torch.optim.Adam([flat.flat], lr=0.1), torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(5):
        flat.backward(flattened.loss(inputs))
        flat.clip_(torch.tensor([1.0]))
        ours.step()
        theirs.zero_grad()
        plain.loss(inputs).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(flattened.state_dict()[name], value, msg=name)
    assert not torch.equal(flattened.body[0].weight, Net().body[0].weight)


def test_parameters_are_aligned_views_of_flat_tensor(nets: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    _, flattened, flat, _ = nets
    start, end = flat.flat.data_ptr(), flat.flat.data_ptr() + flat.flat.numel() * 4
    trained = [p for p in flattened.parameters() if p.requires_grad and p.numel()]
    assert all(start <= p.data_ptr() < end and (p.data_ptr() - start) % 256 == 0 for p in trained)
    assert not start <= flattened.frozen.data_ptr() < end


def test_state_dict_loads_into_flat_tensor_in_place(nets: tuple[Net, Net, FlatParameters, Tensor]) -> None:
    _, flattened, flat, inputs = nets
    other = Net()
    addresses = [p.data_ptr() for p in flattened.parameters()]
    flattened.load_state_dict(other.state_dict())
    assert [p.data_ptr() for p in flattened.parameters()] == addresses
    weight = other.body[2].weight
    start = (flattened.body[2].weight.data_ptr() - flat.flat.data_ptr()) // 4
    assert torch.equal(flat.flat.view(-1)[start : start + weight.numel()].view_as(weight), weight)
    assert torch.equal(flattened.body(inputs), other.body(inputs))
    # the state dict equals that of a module without flat parameters
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in flattened.state_dict().items())


def test_members_have_own_rows_and_are_clipped_separately() -> None:
    torch.manual_seed(3)
    nets, inputs, limits = [Net() for _ in range(3)], torch.randn(20, 3), torch.tensor([0.1, 1e6, 0.5])
    flattened_nets = copy.deepcopy(nets)
    together, alone = FlatParameters(*flattened_nets), [FlatParameters(net) for net in nets]
    assert together.flat.shape == (3, alone[0].flat.shape[1])
    together.backward(torch.stack([flattened.loss(inputs) for flattened in flattened_nets]).sum())
    norms = together.clip_(limits)
    for member, (net, own) in enumerate(zip(nets, alone)):
        own.backward(net.loss(inputs))
        (norm,) = own.clip_(limits[member : member + 1])
        assert torch.equal(norm, norms[member])
        assert torch.equal(own.grad[0], together.grad[member])
        assert torch.equal(own.flat[0], together.flat[member])
