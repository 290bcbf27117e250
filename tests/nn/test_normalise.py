"""Running normalisation of observations."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unidle.nn.normalise import RunningNorm


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.0, 1e3, -1e5]))
def test_running_stats_match_stats_of_all_data(sizes: list[int], seed: int, centre: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [centre * i + torch.randn(size, 3, generator=generator) * (i + 1) for i, size in enumerate(sizes)]
    norm = RunningNorm(3)
    for batch in batches:
        norm.update(batch)
    all_data = torch.cat(batches).double()
    torch.testing.assert_close(norm.mean, all_data.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.var, all_data.var(0, unbiased=False), rtol=1e-9, atol=1e-10)
    assert norm.count.item() == len(all_data)


def test_small_variance_on_large_offset_is_not_lost_to_rounding() -> None:
    norm = RunningNorm(1)
    data = 1e6 + torch.tensor([[0.0], [1.0]]).repeat(500, 1)  # float32 sums of squares would lose this variance
    for batch in data.split(10):
        norm.update(batch)
    assert norm.var.item() == 0.25
    torch.testing.assert_close(norm(data[:2]), torch.tensor([[-1.0], [1.0]]))


def test_norm_is_identity_before_first_update() -> None:
    values = torch.randn(5, 3) * 100
    assert torch.equal(RunningNorm(3)(values), values)


def test_forward_does_not_change_stats() -> None:
    norm = RunningNorm(2)
    norm.update(torch.randn(50, 2) * 3 + 1)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    values = torch.randn(200, 2) * 9 - 4
    first = norm(values)
    assert torch.equal(norm(values), first)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_normalised_data_has_mean_0_and_std_1() -> None:
    norm = RunningNorm(3)
    batch = torch.randn(1000, 3) * torch.tensor([0.01, 1.0, 50.0]) + torch.tensor([5.0, 0.0, -300.0])
    norm.update(batch)
    torch.testing.assert_close(norm(batch).mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(norm(batch).std(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)


def test_constant_feature_stays_finite() -> None:
    norm = RunningNorm(1)
    norm.update(torch.full((10, 1), 7.0))
    assert norm(torch.full((2, 1), 7.0)).tolist() == [[0.0], [0.0]]


def test_updates_are_in_place_and_state_dict_restores_stats() -> None:
    norm, other = RunningNorm(2), RunningNorm(2)
    addresses = [buffer.data_ptr() for buffer in norm.buffers()]
    norm.update(torch.randn(20, 2) + 3)
    assert [buffer.data_ptr() for buffer in norm.buffers()] == addresses
    other.load_state_dict(norm.state_dict())
    values = torch.randn(4, 2)
    assert torch.equal(other(values), norm(values))
