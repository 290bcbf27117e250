"""A sample of the fault trial: disturbed runs and damaged files lose nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_trial import COUNTED, merged
from paths import BENCHMARKS


@pytest.mark.parametrize(
    ("part", "first", "tries"),
    [
        ("runs", 0, 1),  # SIGTERM to a run whose environments start programs, while it saves; `tee` was killed
        ("runs", 41, 1),  # a disk that fills up during training
        ("groups", 14, 1),  # SAC: killed while it saves, resumed, and killed again
        ("sweeps", 0, 1),
        ("checkpoints", 1, 12),
        ("texts", 1, 19),
    ],
)
def test_sample_of_the_fault_trial_holds(part: str, first: int, tries: int, tmp_path: Path) -> None:
    numbers = ["--first", str(first), "--tries", str(tries), "--results", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "fault_trial.py"), "--part", part, *numbers]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (batch,) = json.loads((tmp_path / "fault_trial.json").read_text())["batches"]
    assert batch["held"] == batch["tries"] == tries
    assert batch["failures"] == []


def test_results_of_later_calls_are_added_or_replaced() -> None:
    def batch(part: str, first: int, tries: int) -> dict[str, Any]:
        return {**dict.fromkeys(COUNTED, 0), "part": part, "seed": 0, "first": first, "tries": tries, "held": tries}

    found = merged([], batch("runs", 0, 10))
    found = merged(found["batches"], batch("texts", 0, 5))
    found = merged(found["batches"], batch("runs", 10, 10))
    found = merged(found["batches"], batch("runs", 10, 4))  # the same numbers again
    assert [(each["part"], each["first"], each["tries"]) for each in found["batches"]] == [
        ("runs", 0, 10),
        ("runs", 10, 4),
        ("texts", 0, 5),
    ]
    assert (found["tries"], found["held"]) == (19, 19)
    assert found["tries_by_part"] == {"runs": 14, "groups": 0, "sweeps": 0, "checkpoints": 0, "texts": 5}
