"""How far a run has come, and its best evaluation so far."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters of a run; all of them are in its checkpoints."""

    step: int = 0
    iteration: int = 0
    best_success: float = -math.inf  # success rate of the best evaluation, if reported
    best_return: float = -math.inf  # its mean return
    best_step: int = -1  # the step it evaluated
    highest_return: float = -math.inf  # highest mean return of any evaluation
    last_evaluated: int = -1  # step at which the latest evaluation was requested

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from a checkpoint.

        Checkpoints of earlier versions, which ranked evaluations by return only, have no success rate.
        """
        state = {"best_success": -math.inf, "highest_return": state["best_return"], **state}
        for name in asdict(self):
            setattr(self, name, state[name])

    def update_best(self, evaluation: dict[str, Any]) -> bool:
        """Update the best evaluation so far with this evaluation's record; returns whether it is now the best."""
        self.highest_return = max(self.highest_return, evaluation_rank(evaluation)[1])
        if not evaluation_rank(evaluation) > (self.best_success, self.best_return):
            return False
        self.best_success, self.best_return = evaluation_rank(evaluation)
        self.best_step = evaluation["step"]
        return True

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation, with the keys of its record; None if there is none."""
        if self.best_step < 0:
            return None
        success = {"eval/success": self.best_success} if self.best_success >= 0 else {}
        return {"step": self.best_step, "eval/return_mean": self.best_return, **success}


def evaluation_rank(evaluation: dict[str, Any]) -> tuple[float, float]:
    """Sort key of an evaluation's record: success rate, if reported, then mean return. NaN and infinity rank lowest."""
    return _rank(evaluation.get("eval/success")), _rank(evaluation.get("eval/return_mean"))


def _rank(value: Any) -> float:
    """The number itself; -inf if it is not finite, and for what a damaged metrics.jsonl may have in its place."""
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return value if is_finite else -math.inf
