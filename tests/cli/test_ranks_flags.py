"""`--gpus`, `--ranks` and `--n-envs-per-gpu`."""

from __future__ import annotations

import pytest
import torch

from unidle.cli.ranks import ranks_to_start, with_n_envs_of_job
from unidle.distributed.place import Place
from unidle.errors import UsageError


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in Place(rank, size, rank, size).variables().items():
        monkeypatch.setenv(name, value)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "found", "sentence"),
    [
        (2, 0, "--gpus 2: torch finds no CUDA GPU on this machine; --ranks 2 trains on the CPU in 2 processes."),
        (9, 1, "--gpus 9: this machine has 1 GPU; use --gpus 1."),
        (9, 4, "--gpus 9: this machine has 4 GPUs; use --gpus 4."),
        (0, 4, "--gpus is 0; it must be at least 1."),
    ],
)
def test_more_gpus_than_there_are_is_refused(
    gpus: int, found: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, found)
    with pytest.raises(UsageError) as refused:
        ranks_to_start(gpus, None)
    assert str(refused.value) == sentence


def test_number_of_ranks_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert ranks_to_start(4, None) == 4
    assert ranks_to_start(1, None) is None  # this process is enough
    assert ranks_to_start(None, 16) == 16
    assert ranks_to_start(None, None) is None


def test_rank_starts_no_further_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1, 3)
    assert ranks_to_start(None, 3) is None
    with pytest.raises(UsageError, match="--ranks is 2, but torchrun has started 3 ranks; remove --ranks"):
        ranks_to_start(None, 2)


def test_environments_per_gpu_are_those_of_the_job_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_n_envs_of_job(["--gpus", "4", "--n-envs-per-gpu", "16"])[-2:] == ["--n-envs", "64"]
    assert with_n_envs_of_job(["--ranks=2", "--n-envs-per-gpu=16"])[-2:] == ["--n-envs", "32"]
    as_rank(monkeypatch, 0, 3)
    assert with_n_envs_of_job(["--n-envs-per-gpu", "16"])[-2:] == ["--n-envs", "48"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--n-envs-per-gpu", "16"], "--n-envs-per-gpu needs the number of ranks"),
        (["--n-envs-per-gpu", "16", "--n-envs", "4"], "--n-envs is for all ranks together"),
    ],
)
def test_environments_per_gpu_need_a_number_of_ranks_and_nothing_else(flags: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        with_n_envs_of_job(flags)
