"""TensorBoard event files, also after a resume."""

from __future__ import annotations

import resource
import struct
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.event_pb2 import Event

from unidle.metrics.jsonl import JsonlWriter
from unidle.metrics.log import MetricLog
from unidle.metrics.tensorboard import TensorBoardWriter


def write_steps(folder: Path, steps: range, *, start: int = 0) -> None:
    writer = TensorBoardWriter(folder, start)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def events(folder: Path) -> list[Event]:
    """All events of all files; the format is length, checksum, event, checksum."""
    found = []
    for path in sorted(folder.iterdir()):  # sorted by name, and so by time, as TensorBoard does
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            (length,) = struct.unpack_from("<Q", content, offset)
            found.append(Event.FromString(content[offset + 12 : offset + 12 + length]))
            offset += 12 + length + 4
    return found


def visible_points(folder: Path) -> list[tuple[str, int, float]]:
    """The (tag, step, value) points TensorBoard shows: a session start hides earlier points from its step on."""
    points: list[tuple[str, int, float]] = []
    for event in events(folder):
        if event.HasField("session_log"):
            points = [point for point in points if point[1] < event.step]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def test_metrics_of_one_step_are_one_event(tmp_path: Path) -> None:
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
def test_each_step_is_visible_once_after_resume(tmp_path: Path, start: int) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    (first,) = tmp_path.iterdir()
    *name, second = first.name.split(".", 4)[:4]  # events.out.tfevents.1700000000.host
    rest = first.name.split(".", 4)[4]
    first.rename(first.with_name(f"{'.'.join(name)}.{int(second) - 60}.{rest}"))  # as if written a minute ago
    write_steps(tmp_path, range(start + 10, 60, 10), start=start)
    assert visible_points(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]


def test_resume_within_a_second_keeps_first_file(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    write_steps(tmp_path, range(40, 60, 10), start=30)
    assert visible_points(tmp_path) == [("train/loss", step, step / 2) for step in range(10, 60, 10)]


def test_full_disk_drops_the_writer_with_one_message(tmp_path: Path) -> None:
    writer, messages = TensorBoardWriter(tmp_path / "tensorboard"), list[str]()
    writer.write(0, {"train/loss": 0.5})
    log = MetricLog(JsonlWriter(tmp_path / "metrics.jsonl"), [writer], messages.append)
    with Path("/dev/full").open("wb", buffering=0) as writer._file:
        for step in range(100):  # more than any queue would hold
            log.write({"kind": "iteration", "step": step, "train/loss": 0.5})
    log.close()
    (message,) = messages
    assert "TensorBoardWriter failed and gets no more metrics" in message
    assert "No space left on device" in message


def test_record_that_fits_in_part_is_an_error(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(0, {"train/loss": 0.5})
    (file,) = tmp_path.iterdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write(1, {"train/loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.close()


def test_events_are_on_disk_at_once_and_without_threads(tmp_path: Path) -> None:
    threads = threading.active_count()
    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"train/loss": 0.5})
    assert visible_points(tmp_path) == [("train/loss", 1, 0.5)]
    assert threading.active_count() == threads
    writer.close()


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    write_steps(tmp_path, range(10, 60, 10))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, step / 2) for step in range(10, 60, 10)
    ]


def test_folder_that_cannot_be_created_drops_the_writer(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    writer, messages = TensorBoardWriter(tmp_path / "tensorboard"), list[str]()
    log = MetricLog(JsonlWriter(tmp_path / "metrics.jsonl"), [writer], messages.append)
    for step in range(2):
        log.write({"kind": "iteration", "step": step, "train/loss": 0.5})
    log.close()
    assert len(messages) == 1
