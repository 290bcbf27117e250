"""The metric log: which records reach metric writers, and what happens if a writer fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from unidle.errors import UsageError
from unidle.metrics.jsonl import JsonlWriter, read_records
from unidle.metrics.log import MetricLog
from unidle.metrics.wandb import WandbWriter


class InMemoryWriter:
    """Keeps metrics in memory; raises at the steps in `fails_at`, and in `close` if they include -1."""

    def __init__(self, *fails_at: int) -> None:
        self.fails_at, self.written, self.is_closed = fails_at, list[tuple[int, dict[str, float]]](), False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if step in self.fails_at:
            raise ConnectionError("no route to host")
        self.written.append((step, metrics))

    def close(self) -> None:
        self.is_closed = True
        if -1 in self.fails_at:
            raise ConnectionError("no route to host")


def metric_log(folder: Path, *writers: InMemoryWriter) -> tuple[MetricLog, list[str]]:
    messages: list[str] = []
    return MetricLog(JsonlWriter(folder / "metrics.jsonl"), writers, messages.append), messages


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "iteration", "step": step, "train/loss": 0.5, **more}


def test_writers_receive_numbers_but_no_text(tmp_path: Path) -> None:
    writer = InMemoryWriter()
    log, _ = metric_log(tmp_path, writer)
    log.write(record(64, **{"rollout/episodes": 3, "eval/best": True, "note": "text"}))
    log.close()
    assert writer.written == [(64, {"train/loss": 0.5, "rollout/episodes": 3.0, "eval/best": 1.0})]
    assert writer.is_closed


def test_faults_are_recorded_but_not_sent_to_writers(tmp_path: Path) -> None:
    writer = InMemoryWriter()
    log, _ = metric_log(tmp_path, writer)
    log.write({"kind": "fault", "step": 8, "env": 1, "text": "Environment 1 failed."})
    log.close()
    assert writer.written == []
    assert [r["kind"] for r in read_records(tmp_path / "metrics.jsonl")] == ["fault"]


def test_failing_writer_is_dropped_with_one_message(tmp_path: Path) -> None:
    failing, working = InMemoryWriter(20), InMemoryWriter()
    log, messages = metric_log(tmp_path, failing, working)
    for step in (10, 20, 30, 40):
        log.write(record(step))
    log.close()
    assert messages == [
        "The metric writer InMemoryWriter failed and gets no more metrics (ConnectionError: no route to host); "
        "training continues."
    ]
    assert [step for step, _ in failing.written] == [10]
    assert [step for step, _ in working.written] == [10, 20, 30, 40]
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]


def test_all_writers_are_closed_if_one_fails_to_close(tmp_path: Path) -> None:
    failing, working = InMemoryWriter(-1), InMemoryWriter()
    log, messages = metric_log(tmp_path, failing, working)
    log.close()
    assert working.is_closed
    assert messages == ["The metric writer InMemoryWriter could not be closed (ConnectionError: no route to host)."]


def test_missing_wandb_package_error_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    with pytest.raises(UsageError, match=r"pip install 'unidle\[wandb\]'"):
        WandbWriter(tmp_path, {})
