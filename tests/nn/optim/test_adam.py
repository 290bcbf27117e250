"""Adam on flat parameters against torch.optim.Adam."""

from __future__ import annotations

import torch

from unidle.nn.optim.adam import FlatAdam


def test_steps_match_torch_adam_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(1, 500), torch.nn.Parameter(torch.zeros(1, 500))
    theirs.data.copy_(ours)
    grad, rate = torch.zeros(1, 500), torch.tensor([3e-3])
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


def test_skipped_step_changes_nothing_and_is_not_counted() -> None:
    flat, grad = torch.ones(1, 8), torch.ones(1, 8)
    adam = FlatAdam(flat, grad, torch.tensor([0.1]), eps=1e-5)
    adam.step(skip=torch.zeros(1))
    before = [flat.clone(), *(value.clone() for value in adam.state_dict().values())]
    adam.step(skip=torch.ones(1))
    after = [flat, *adam.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    adam.step(skip=torch.zeros(1))
    assert float(adam.steps) == 2
    assert not torch.equal(flat, before[0])


def test_loaded_state_continues_bit_for_bit() -> None:
    torch.manual_seed(1)
    grads = torch.randn(6, 8)
    whole, resumed = torch.zeros(1, 8), torch.zeros(1, 8)
    grad, rate = torch.zeros(1, 8), torch.tensor([0.1])
    uninterrupted = FlatAdam(whole, grad, rate, eps=1e-5)
    for row in grads:
        grad.copy_(row)
        uninterrupted.step()
    first = FlatAdam(resumed, grad, rate, eps=1e-5)
    for row in grads[:3]:
        grad.copy_(row)
        first.step()
    second = FlatAdam(resumed, grad, rate, eps=1e-5)
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for row in grads[3:]:
        grad.copy_(row)
        second.step()
    assert torch.equal(whole, resumed)


def test_members_step_and_skip_independently() -> None:
    torch.manual_seed(2)
    rates, skips = torch.tensor([3e-3, 1e-2, 1e-4]), torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    start, grads = torch.randn(3, 70), torch.randn(3, 3, 70)
    flat, grad = start.clone(), torch.zeros(3, 70)
    together = FlatAdam(flat, grad, rates, eps=1e-5)
    for skip, given in zip(skips, grads):
        grad.copy_(given)
        together.step(skip)
    for member in range(3):
        alone, own = start[member : member + 1].clone(), torch.zeros(1, 70)
        adam = FlatAdam(alone, own, rates[member : member + 1], eps=1e-5)
        for skip, given in zip(skips, grads):
            own.copy_(given[member : member + 1])
            adam.step(skip[member : member + 1])
        assert torch.equal(flat[member], alone[0])
        assert float(together.steps[member]) == 3 - float(skips[:, member].sum())
