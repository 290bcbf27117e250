"""The journal of a run: what is in it after a kill, and what TensorBoard will read."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from unidle.errors import UsageError, WriteError
from unidle.metrics.journal import Journal, read_records


def write_steps(folder: Path, steps: range, *, start: int = 0, tensorboard: bool = False) -> None:
    journal = Journal(folder, step=start, tensorboard=tensorboard)
    for step in steps:
        journal.write({"kind": "iteration", "step": step, "train/loss": step / 2})
    journal.close()


def events(folder: Path) -> list[Event]:
    """All events of all files, in order: each is a length, its checksum, the event, its checksum."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):  # as TensorBoard reads them: by name, that is, by time
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return found


def shown(folder: Path) -> list[tuple[str, int, float]]:
    """The (tag, step, value) that TensorBoard would show: a session's start hides what was written from its step on."""
    points: list[tuple[str, int, float]] = []
    for event in events(folder):
        if event.HasField("session_log"):
            points = [point for point in points if point[1] < event.step]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def test_each_record_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, tensorboard=False)
    record = {"kind": "evaluation", "step": 5, "eval/return_mean": 1.5, "eval/best": True}
    journal.write(record)
    assert read_records(tmp_path / "metrics.jsonl") == [record]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [record]
    journal.close()
    assert not (tmp_path / "tensorboard").exists()


def test_records_past_the_step_are_dropped_on_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    write_steps(tmp_path, range(40, 60, 10), start=30)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50]


def test_a_run_resumed_from_its_very_start_keeps_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 40, 10))
    write_steps(tmp_path, range(10, 20, 10), start=0)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [10]


@pytest.mark.parametrize("length", [1, 10, 30])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, length: int) -> None:
    write_steps(tmp_path, range(10, 40, 10))
    path = tmp_path / "metrics.jsonl"
    content = path.read_text()
    last = content.splitlines(keepends=True)[-1]
    path.write_text(content[: -len(last)] + last[:length])
    assert [record["step"] for record in read_records(path)] == [10, 20]
    write_steps(tmp_path, range(30, 50, 10), start=20)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30, 40]


def test_there_are_no_records_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_record_is_one_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path, tensorboard=True)
    journal.write({"kind": "iteration", "step": 5, "train/loss": 0.5, "rollout/episodes": 3, "eval/best": True})
    journal.close()
    (event,) = (event for event in events(tmp_path) if event.summary.value)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [
        ("train/loss", 0.5),
        ("rollout/episodes", 3.0),
        ("eval/best", 1.0),
    ]
    assert event.step == 5


def test_tensorboard_gets_every_number_but_not_the_words(tmp_path: Path) -> None:
    journal = Journal(tmp_path, tensorboard=True)
    journal.write({"kind": "iteration", "step": 64, "train/loss": 0.5, "rollout/episodes": 3, "note": "words"})
    journal.close()
    assert sorted(shown(tmp_path)) == [("rollout/episodes", 64, 3.0), ("train/loss", 64, 0.5)]


@pytest.mark.parametrize("start", [0, 30])
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path, start: int) -> None:
    write_steps(tmp_path, range(10, 60, 10), tensorboard=True)
    (first,) = (tmp_path / "tensorboard").iterdir()
    *name, second = first.name.split(".", 4)[:4]  # events.out.tfevents.1700000000.host
    rest = first.name.split(".", 4)[4]
    first.rename(first.with_name(f"{'.'.join(name)}.{int(second) - 60}.{rest}"))  # as if it had been a minute ago
    write_steps(tmp_path, range(start + 10, 60, 10), start=start, tensorboard=True)
    assert shown(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]


def test_a_resume_within_a_second_does_not_write_over_the_first_file(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 60, 10), tensorboard=True)
    write_steps(tmp_path, range(40, 60, 10), start=30, tensorboard=True)
    assert shown(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]


def test_without_the_package_wandb_the_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python itself does for a module that must not be found
    with pytest.raises(UsageError, match=r"pip install 'unidle\[wandb\]'"):
        Journal(tmp_path, tensorboard=False, wandb=True)


def test_a_full_disk_gets_one_sentence_and_closing_says_nothing_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path, tensorboard=False)
    journal._file.close()
    journal._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(
        WriteError, match=r"^/dev/full cannot be written \(No space left on device\); make room there\.$"
    ):
        journal.write({"kind": "iteration", "step": 1})
    journal.close()
