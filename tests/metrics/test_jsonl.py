"""metrics.jsonl: what it holds after a kill and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unidle.errors import WriteError
from unidle.metrics.jsonl import JsonlWriter, read_records


def write_steps(path: Path, steps: range, *, start: int = 0) -> None:
    writer = JsonlWriter(path, start)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def test_each_record_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    record = {"kind": "evaluation", "step": 5, "eval/return_mean": 1.5, "eval/best": True}
    writer.append(record)
    assert read_records(tmp_path / "metrics.jsonl") == [record]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [record]
    writer.close()


def test_metrics_are_a_record_of_their_kind(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(5, {"train/loss": 0.5})
    writer.write(7, {"eval/return_mean": 1.0}, kind="evaluation")
    writer.close()
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"kind": "iteration", "step": 5, "train/loss": 0.5},
        {"kind": "evaluation", "step": 7, "eval/return_mean": 1.0},
    ]


def test_records_past_the_step_are_dropped_on_resume(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", range(10, 60, 10))
    write_steps(tmp_path / "metrics.jsonl", range(40, 60, 10), start=30)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50]


def test_a_run_resumed_from_step_0_keeps_no_records(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", range(10, 40, 10))
    write_steps(tmp_path / "metrics.jsonl", range(10, 20, 10), start=0)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [10]


@pytest.mark.parametrize("length", [1, 10, 30])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(10, 40, 10))
    content = path.read_text()
    last = content.splitlines(keepends=True)[-1]
    path.write_text(content[: -len(last)] + last[:length])
    assert [record["step"] for record in read_records(path)] == [10, 20]
    write_steps(path, range(30, 50, 10), start=20)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30, 40]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_raises_one_sentence_and_closing_raises_nothing(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer._file.close()
    writer._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(
        WriteError, match=r"^Cannot write /dev/full \(No space left on device\); free some disk space\.$"
    ):
        writer.write(1, {})
    writer.close()
