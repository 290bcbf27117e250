"""The key figures of a group of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unidle.groups.runs import FINISHED, read_runs
from unidle.report.statistics import spread


def summarise(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the key figures of the runs in `folders` as plain values.

    Steps are those of all runs together; the runs trained side by side, so the time is that of the longest.
    """
    runs = read_runs(folders)
    histories = [run.history for run in runs if run.history is not None]
    final = [value for run in runs if (value := run.final_return) is not None]
    best = [value for run in runs if (value := run.best_return) is not None]
    return {
        "n_runs": len(runs),
        "finished": sum(run.state == FINISHED for run in runs),
        "final_evaluation": asdict(spread(final)),
        "best_evaluation": asdict(spread(best)),
        "steps": sum(history.steps for history in histories),
        "wall_seconds": max((history.wall for history in histories), default=0.0),
    }
