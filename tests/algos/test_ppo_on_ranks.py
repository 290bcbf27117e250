"""PPO on several ranks: its steps are those of one process on the whole minibatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_ranks import on_ranks
from torch.testing import assert_close

from unidle.algos.ppo import explained_variance, normalised_over_ranks


class TwoHalves:
    """In place of two ranks that have the same samples."""

    def merged(self, mean: torch.Tensor, var: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return mean, var, 2 * count


def test_advantages_are_normalised_with_the_statistics_of_whole_minibatches() -> None:
    advantages = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    orders = torch.randperm(12, generator=torch.Generator().manual_seed(2)).view(3, 4)
    found = normalised_over_ranks(advantages, orders, TwoHalves())  # type: ignore[arg-type]
    for order in orders:
        whole = advantages[order].repeat(2, 1)  # of both ranks
        assert_close(found[order], (advantages[order] - whole.mean()) / (whole.std() + 1e-8))


def test_explained_variance_is_that_of_all_ranks() -> None:
    values, returns = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    found = explained_variance(values, returns, TwoHalves())  # type: ignore[arg-type]
    assert_close(found.float(), explained_variance(values.repeat(2), returns.repeat(2)))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_steps_on_ranks_equal_those_of_one_process(size: int, kernels: bool, tmp_path: Path) -> None:
    """Two minibatches with clipped gradients; Adam's large epsilon keeps steps proportional to gradients."""
    for found in on_ranks("ppo_step", size, tmp_path, kernels=kernels, target_kl=None):
        moved = (found["expected"] - found["start"]).norm()
        assert moved > 0.01
        assert (found["weights"] - found["expected"]).norm() < 1e-5 * moved
        assert_close(found["metrics"], found["expected_metrics"])


@pytest.mark.parametrize("target_kl", [0.0001, 1000.0])
def test_target_kl_stops_ranks_where_it_stops_one_process(target_kl: float, tmp_path: Path) -> None:
    for found in on_ranks("ppo_step", 2, tmp_path, kernels=True, target_kl=target_kl):
        assert found["stopped"] == found["expected_stopped"] == float(target_kl < 1)
        assert_close(found["weights"], found["expected"], rtol=1e-5, atol=1e-6)
