"""Choice of the device and the number of worker processes."""

from __future__ import annotations

import pytest
import torch

from unidle.config import Config, Engine
from unidle.config.validate import validated
from unidle.engine import placement
from unidle.engine.placement import choose_device, choose_vector_envs, choose_workers, too_many_workers
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_cores", lambda: 8)


@pytest.mark.parametrize(
    ("engine", "n_envs", "step_seconds", "is_busy", "workers"),
    [
        (Engine(), 16, 1e-6, False, 0),  # communication would cost more than the steps
        (Engine(), 16, 1e-3, False, 8),
        (Engine(), 16, 1e-3, True, 7),  # one core is left to the trainer
        (Engine(), 15, 1e-3, False, 8),
        (Engine(), 12, 1e-3, False, 6),  # two each, rather than two or one
        (Engine(), 9, 1e-3, False, 5),
        (Engine(), 8, 1e-3, False, 8),
        (Engine(workers=8), 12, 1e-3, False, 8),
        (Engine(), 3, 1e-3, False, 3),
        (Engine(), 1, 1e-3, False, 0),  # nothing to distribute
        (Engine(), 1, 1e-3, True, 1),  # the environment steps while the trainer is busy
        (Engine(subproc=True), 16, 1e-6, False, 8),
        (Engine(subproc=False), 16, 1.0, False, 0),
        (Engine(workers=2), 16, 1e-6, True, 2),
    ],
)
def test_workers_are_used_if_faster_or_requested(
    engine: Engine, n_envs: int, step_seconds: float, is_busy: bool, workers: int
) -> None:
    assert choose_workers(engine, n_envs, step_seconds, is_busy=is_busy) == workers


FACTORY = EnvMaker("mine:make", list)
NATIVE = EnvMaker("mine:", list, kind="native", native=lambda maker, size: None)


@pytest.mark.parametrize(
    ("maker", "engine", "device", "overlap", "count", "processes"),
    [
        (NATIVE, Engine(), GPU, True, 2, 2),  # one steps while the other waits for its actions
        (NATIVE, Engine(), GPU, False, 2, 0),
        (NATIVE, Engine(), CPU, True, 1, 1),  # with quick steps, one inference for all is faster
        (NATIVE, Engine(slices=4), GPU, True, 4, 4),
        (NATIVE, Engine(workers=3), GPU, False, 3, 3),
        (NATIVE, Engine(workers=99), GPU, True, 16, 16),
        (NATIVE, Engine(subproc=True), GPU, False, 2, 2),
        (NATIVE, Engine(subproc=False), GPU, True, 2, 0),
        (FACTORY, Engine(), GPU, True, 1, 1),  # a factory returns one
        (FACTORY, Engine(workers=3), GPU, True, 1, 1),
        (FACTORY, Engine(), GPU, False, 1, 0),
        (FACTORY, Engine(subproc=True), CPU, False, 1, 1),
        (FACTORY, Engine(subproc=False), GPU, True, 1, 0),
    ],
)
def test_vector_envs_have_their_own_processes_with_overlap_or_if_requested(
    maker: EnvMaker, engine: Engine, device: torch.device, overlap: bool, count: int, processes: int
) -> None:
    assert choose_vector_envs(maker, engine, 16, 1e-6, device, overlap=overlap) == (count, processes)


@pytest.mark.parametrize("maker", [NATIVE, FACTORY])
def test_vector_envs_are_split_into_one_number_of_parts(maker: EnvMaker) -> None:
    assert choose_vector_envs(NATIVE, Engine(workers=4, slices=4), 16, 1e-6, GPU, overlap=True) == (4, 4)
    with pytest.raises(UsageError, match="are 4 and 8; remove one of them"):
        choose_vector_envs(maker, Engine(workers=4, slices=8), 16, 1e-6, GPU, overlap=True)


def test_more_workers_than_cores_warn_with_number_to_use() -> None:
    assert too_many_workers(Engine(workers=8)) is None
    assert "use --workers 8" in str(too_many_workers(Engine(workers=9)))


def test_missing_gpu_is_error_but_auto_falls_back_to_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UsageError, match="no CUDA GPU"):
        choose_device("cuda")


def test_second_gpu_is_chosen_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("auto") == torch.device("cuda")
    with pytest.raises(UsageError, match="--device cuda:2: this machine has 2 GPUs, counted from 0"):
        choose_device("cuda:2")


@pytest.mark.parametrize("device", ["cuda:x", "gpu", "cuda:", "mps"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="use auto, cpu, cuda, or cuda:1"):
        validated(Config().with_values({"env": "A-v0", "device": device}, "test"))
