"""The key figures of a group."""

from __future__ import annotations

import json
from pathlib import Path

from dashboard_runs import make_run

from unidle.groups.statistics import summarise


def test_summary_is_plain_and_counts_readable_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"seed-{i}", seconds=seconds, seed=i) for i, seconds in enumerate((4, 4, 3))]
    summary = summarise([*runs, tmp_path / "seed-3"])
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["n_runs"], summary["finished"], summary["steps"], summary["wall_seconds"]) == (4, 2, 11_000, 4.0)
    final = summary["final_evaluation"]
    assert (final["best"], final["worst"], final["median"]) == (104.0, 103.0, 104.0)
    assert (final["low"], final["high"]) == (103.0, 104.0)
    assert summary["best_evaluation"] == final


def test_summary_of_runs_without_evaluations_has_unknown_results(tmp_path: Path) -> None:
    summary = summarise([tmp_path / "seed-1"])
    assert summary["steps"] == 0
    assert set(summary["final_evaluation"].values()) == {None}
