"""The flat Adam against torch's own."""

from __future__ import annotations

import torch

from unidle.nn.optim.adam import FlatAdam


def test_steps_equal_those_of_torch_adam_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(500), torch.nn.Parameter(torch.zeros(500))
    theirs.data.copy_(ours)
    grad, rate = torch.zeros(500), torch.tensor(3e-3)
    flat = FlatAdam(ours, grad, rate, eps=1e-5)
    reference = torch.optim.Adam([theirs], lr=3e-3, eps=1e-5, fused=True)
    for step in range(20):
        rate.fill_(3e-3 / (step + 1))
        reference.param_groups[0]["lr"] = float(rate)
        grad.normal_()
        theirs.grad = grad.clone()
        flat.step()
        reference.step()
    assert torch.equal(ours, theirs.detach())


def test_a_skipped_step_changes_nothing_and_is_not_counted() -> None:
    flat, grad = torch.ones(8), torch.ones(8)
    adam = FlatAdam(flat, grad, torch.tensor(0.1), eps=1e-5)
    adam.step(skip=torch.zeros(()))
    before = [flat.clone(), *(value.clone() for value in adam.state_dict().values())]
    adam.step(skip=torch.ones(()))
    after = [flat, *adam.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    adam.step(skip=torch.zeros(()))
    assert float(adam.steps) == 2
    assert not torch.equal(flat, before[0])


def test_a_loaded_state_goes_on_as_if_it_had_never_stopped() -> None:
    torch.manual_seed(1)
    grads = torch.randn(6, 8)
    whole, parts = torch.zeros(8), torch.zeros(8)
    grad, rate = torch.zeros(8), torch.tensor(0.1)
    straight = FlatAdam(whole, grad, rate, eps=1e-5)
    for row in grads:
        grad.copy_(row)
        straight.step()
    first = FlatAdam(parts, grad, rate, eps=1e-5)
    for row in grads[:3]:
        grad.copy_(row)
        first.step()
    second = FlatAdam(parts, grad, rate, eps=1e-5)
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for row in grads[3:]:
        grad.copy_(row)
        second.step()
    assert torch.equal(whole, parts)
