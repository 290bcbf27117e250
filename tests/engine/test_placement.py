"""Placement: device and worker processes."""

from __future__ import annotations

import pytest
import torch

from unidle.config import Engine
from unidle.engine import placement
from unidle.engine.placement import choose_device, choose_workers, too_many_workers
from unidle.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_cores", lambda: 8)


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
def test_workers_are_used_where_they_save_time_or_are_requested(
    engine: Engine, n_envs: int, step_seconds: float, is_busy: bool, workers: int
) -> None:
    assert choose_workers(engine, n_envs, step_seconds, is_busy=is_busy) == workers


def test_more_workers_than_cores_give_a_warning_with_the_number_to_use() -> None:
    assert too_many_workers(Engine(workers=8)) is None
    assert "use --workers 8" in str(too_many_workers(Engine(workers=9)))


def test_a_missing_gpu_is_an_error_and_auto_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UsageError, match="no CUDA GPU"):
        choose_device("cuda")
