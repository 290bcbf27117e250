"""What ranks tell each other, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, results, start
from torch.testing import assert_close

from unidle.distributed.ranks import Ranks
from unidle.nn.normalise import RunningNorm


def test_every_rank_gets_the_same_results(tmp_path: Path) -> None:
    found = on_ranks("reductions", 3, tmp_path)
    for result in found:
        assert_close(result["mean"], torch.tensor([1.0, 1.0]))
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert result["all"] == [True, False]
        assert result["first"] == "from 0"
        assert result["broadcast"].tolist() == [0.0, 0.0]


def test_running_statistics_of_ranks_equal_those_of_whole_batch(tmp_path: Path) -> None:
    found = on_ranks("statistics", 3, tmp_path)
    whole = RunningNorm(3)
    for scale in (1.0, 5.0):
        whole.update(scale * torch.randn(12, 3, generator=torch.Generator().manual_seed(1)) + 3)
    for state in found:
        for name, value in whole.state_dict().items():
            assert_close(state[name], value)
            assert torch.equal(state[name], found[0][name])


@pytest.mark.parametrize("size", [3, 41, 47, 55, 1000])
def test_mean_of_ones_is_exactly_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(Ranks)
    ranks.size, ranks._control = size, None
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(size))
    ones = torch.ones(2)
    ranks.mean_(ones)
    assert ones.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_one_rank_ends_all_and_rank_0_reports_it(rank: int, tmp_path: Path) -> None:
    first, second = on_ranks("agreed_error", 2, tmp_path, rank=rank)
    said = "UsageError: This setting is wrong; use another one."
    assert first == (said if rank == 0 else said.replace("This", "Rank 1: This"))
    assert second.startswith("AgreedError")


@pytest.mark.parametrize("rank", [0, 2])
def test_death_of_one_rank_ends_the_others_at_once(rank: int, tmp_path: Path) -> None:
    assert start("lost", 3, tmp_path, rank=rank) == 3
    found = results("lost", 3, tmp_path)
    assert [result for number, result in enumerate(found) if number != rank] == ["LostRankError"] * 2


def test_rank_that_does_not_answer_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    (error, seconds), _ = on_ranks("silent", 2, tmp_path, rank=1)
    assert error == "LostRankError"
    assert 1.0 < seconds < 4.0
