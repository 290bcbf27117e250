"""The best evaluation so far, and how often checkpoints are written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import unidle
from unidle.engine.checkpoint import saver
from unidle.engine.checkpoint.saver import Saver
from unidle.engine.progress import Progress, evaluation_rank


def evaluation(step: int, mean: float, success: float | None) -> dict[str, Any]:
    reported = {} if success is None else {"eval/success": success}
    return {"step": step, "eval/return_mean": mean, **reported}


@pytest.mark.parametrize("success", [None, 0.5])
def test_nan_return_ranks_lowest(success: float | None) -> None:
    """Infinite rewards of both signs have no mean."""
    records = [evaluation(step, mean, success) for step, mean in ((1, math.nan), (2, -7.0), (3, math.nan), (4, -6.0))]
    progress = Progress()
    is_best = [progress.update_best(record) for record in records]
    assert is_best == [success is not None, True, False, True]  # without success, a NaN return cannot be the best
    assert (progress.best_step, progress.best_return, progress.highest_return) == (4, -6.0, -6.0)
    assert max(records, key=evaluation_rank)["step"] == 4


@pytest.mark.parametrize(
    ("is_slow", "every", "saved"),
    [(True, None, [0, 2048]), (True, 512, [0, 512, 1024, 1536, 2048]), (False, None, list(range(0, 2049, 256)))],
)
def test_slow_checkpoints_are_skipped_unless_user_sets_interval(
    is_slow: bool, every: int | None, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_SHORT_SECONDS", 0.0 if is_slow else 1e9)
    monkeypatch.setattr(saver, "_MAX_SHARE", 0.0)
    steps, save = [], Saver.save

    def recording_save(self: Saver, *parts: Any) -> None:
        steps.append(self._progress.step)
        save(self, *parts)

    monkeypatch.setattr(Saver, "save", recording_save)
    unidle.train(
        "CartPole-v1",
        n_envs=4,
        n_steps=64,
        n_epochs=1,
        timesteps=2048,
        eval_every=0,
        checkpoint_every=every,
        device="cpu",
        runs_dir=str(tmp_path),
        tensorboard=False,
        quiet=True,
    )
    assert sorted(set(steps)) == saved
