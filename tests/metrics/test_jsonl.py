"""metrics.jsonl: its records, also after a kill or a resume."""

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


def test_record_is_readable_immediately(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    record = {"kind": "evaluation", "step": 5, "eval/return_mean": 1.5, "eval/best": True}
    writer.append(record)
    assert read_records(tmp_path / "metrics.jsonl") == [record]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [record]
    writer.close()


def test_metrics_are_written_as_record_of_their_kind(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(5, {"train/loss": 0.5})
    writer.write(7, {"eval/return_mean": 1.0}, kind="evaluation")
    writer.close()
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"kind": "iteration", "step": 5, "train/loss": 0.5},
        {"kind": "evaluation", "step": 7, "eval/return_mean": 1.0},
    ]


def test_resume_drops_records_after_checkpoint_step(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", range(10, 60, 10))
    write_steps(tmp_path / "metrics.jsonl", range(40, 60, 10), start=30)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50]


def test_resume_from_step_0_drops_all_records(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", range(10, 40, 10))
    write_steps(tmp_path / "metrics.jsonl", range(10, 20, 10), start=0)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [10]


@pytest.mark.parametrize("length", [1, 10, 30])
def test_incomplete_last_line_is_dropped(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(10, 40, 10))
    content = path.read_text()
    last = content.splitlines(keepends=True)[-1]
    path.write_text(content[: -len(last)] + last[:length])
    assert [record["step"] for record in read_records(path)] == [10, 20]
    write_steps(path, range(30, 50, 10), start=20)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30, 40]


DAMAGED = [
    *(b"\xff", b"null", b"[1, 2]", b"NaN", b"{", b"", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000),
    *(b'{"kind": "iteration"}', b'{"step": NaN}', b'{"step": "1"}', b'{"step": true}', b'{"step": -1}'),
    *(b'{"step": 1e400}', b'{"step": 99999999999999999999}', b'{"step": null}'),
]


def test_damaged_lines_are_skipped_and_counted_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [b'{"kind": "iteration", "step": 10}', b'{"step":20, "train/loss": NaN}']
    path.write_bytes(b"\n".join([good[0], *DAMAGED, good[1], b'{"step": 3']))
    said: list[str] = []
    assert [record["step"] for record in read_records(path, said.append)] == [10, 20]
    assert said == [f"{path} has {len(DAMAGED)} damaged lines; skipped."]
    writer = JsonlWriter(path, 20, said.append)
    assert said[1:] == said[:1]
    writer.write(30, {})
    writer.close()
    *kept, last = path.read_bytes().splitlines()
    assert kept == good, "the other lines are kept as they were"
    assert json.loads(last)["step"] == 30
    assert len(read_records(path, said.append)) == 3
    assert len(said) == 2


def test_log_is_not_written_through_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "metrics.jsonl"
    for content in (None, b"mine"):
        if content:
            target.write_bytes(content)
        link.symlink_to(target)
        writer = JsonlWriter(link, 1)
        writer.write(5, {})
        writer.close()
        assert not link.is_symlink()
        assert (target.read_bytes() if target.exists() else None) == content
        link.unlink()


def test_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_full_disk_raises_write_error_once(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer._file.close()
    writer._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(
        WriteError, match=r"^Cannot write /dev/full \(No space left on device\); free some disk space\.$"
    ):
        writer.write(1, {})
    writer.close()
