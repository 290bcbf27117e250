"""Which evaluation is the best so far, as a run and its checkpoints keep it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unidle.engine.saving import Progress
from unidle.journal import how_good


def evaluation(step: int, mean: float, success: float | None) -> dict[str, Any]:
    told = {} if success is None else {"eval/success": success}
    return {"step": step, "eval/return_mean": mean, **told}


@pytest.mark.parametrize("success", [None, 0.5])
def test_a_return_that_is_no_number_is_the_worst_and_keeps_no_other_from_being_the_best(success: float | None) -> None:
    """Infinite rewards of both signs have no mean."""
    records = [evaluation(step, mean, success) for step, mean in ((1, math.nan), (2, -7.0), (3, math.nan), (4, -6.0))]
    progress = Progress()
    is_best = [progress.take_note(record) for record in records]
    assert is_best == [success is not None, True, False, True]  # without success, NaN says nothing at all
    assert (progress.best_step, progress.best_return, progress.highest_return) == (4, -6.0, -6.0)
    assert max(records, key=how_good)["step"] == 4
