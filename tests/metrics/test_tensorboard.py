"""TensorBoard: what it shows of a run, also after a resume."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from unidle.metrics.tensorboard import TensorBoardWriter


def write_steps(folder: Path, steps: range, *, start: int = 0) -> None:
    writer = TensorBoardWriter(folder, start)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def events(folder: Path) -> list[Event]:
    """All events of all files, in order: each is a length, its checksum, the event, its checksum."""
    found = []
    for path in sorted(folder.iterdir()):  # as TensorBoard reads them: by name, that is, by time
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


def test_metrics_of_a_step_are_one_event(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(5, {"train/loss": 0.5, "rollout/episodes": 3, "eval/best": True})
    writer.close()
    (event,) = (event for event in events(tmp_path) if event.summary.value)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [
        ("train/loss", 0.5),
        ("rollout/episodes", 3.0),
        ("eval/best", 1.0),
    ]
    assert event.step == 5


@pytest.mark.parametrize("start", [0, 30])
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path, start: int) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    (first,) = tmp_path.iterdir()
    *name, second = first.name.split(".", 4)[:4]  # events.out.tfevents.1700000000.host
    rest = first.name.split(".", 4)[4]
    first.rename(first.with_name(f"{'.'.join(name)}.{int(second) - 60}.{rest}"))  # as if it had been a minute ago
    write_steps(tmp_path, range(start + 10, 60, 10), start=start)
    assert shown(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]


def test_a_resume_within_a_second_does_not_overwrite_the_first_file(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    write_steps(tmp_path, range(40, 60, 10), start=30)
    assert shown(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]
