"""Choices of the engine: device, workers, networks by name."""

from __future__ import annotations

import pytest
import torch

from unidle.config import Engine
from unidle.engine import build
from unidle.engine.build import choose_device, choose_workers, resolve_network, too_many_workers
from unidle.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_cores", lambda: 8)


@pytest.mark.parametrize(
    ("engine", "n_envs", "step_seconds", "is_busy", "workers"),
    [
        (Engine(), 16, 1e-6, False, 0),  # a round trip would cost more than all steps together
        (Engine(), 16, 1e-3, False, 8),
        (Engine(), 16, 1e-3, True, 7),  # one core is the trainer's
        (Engine(), 15, 1e-3, False, 8),
        (Engine(), 12, 1e-3, False, 6),  # two each, rather than two for some and one for others
        (Engine(), 9, 1e-3, False, 5),
        (Engine(), 8, 1e-3, False, 8),
        (Engine(workers=8), 12, 1e-3, False, 8),
        (Engine(), 3, 1e-3, False, 3),
        (Engine(), 1, 1e-3, False, 0),  # nothing to share out
        (Engine(), 1, 1e-3, True, 1),  # a step is taken while this process does something else
        (Engine(subproc=True), 16, 1e-6, False, 8),
        (Engine(subproc=False), 16, 1.0, False, 0),
        (Engine(workers=2), 16, 1e-6, True, 2),
    ],
)
def test_workers_are_used_where_they_save_time_or_are_asked_for(
    engine: Engine, n_envs: int, step_seconds: float, is_busy: bool, workers: int
) -> None:
    assert choose_workers(engine, n_envs, step_seconds, is_busy=is_busy) == workers


def test_more_workers_than_cores_are_said_with_the_number_to_use() -> None:
    assert too_many_workers(Engine(workers=8)) is None
    assert "use --workers 8" in str(too_many_workers(Engine(workers=9)))


def test_a_gpu_that_is_not_there_is_a_mistake_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UsageError, match="no CUDA GPU"):
        choose_device("cuda")


def test_a_network_is_found_by_its_name_and_keeps_it() -> None:
    factory, name = resolve_network("torch.nn:Linear")
    assert factory is torch.nn.Linear
    assert name == "torch.nn:Linear"
    for wrong in ("torch.nn", "torch.nn:NoSuchThing", "<lambda>"):
        with pytest.raises(UsageError):
            resolve_network(wrong)
