"""The speed of a job and its last line of output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from unidle.packing.progress import Progress


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_nothing_is_known_before_there_is_output(output: Path) -> None:
    progress = Progress(output)
    progress.poll([])
    assert (progress.steps_per_second, progress.last_line, progress.run) == (None, "", None)


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("|    fps             | 1234     |\n", 1234.0),
        ("| time/              |      |\n|    fps             | 1.2e+03 |\n", 1200.0),
        ("SPS: 876\n", 876.0),
        ("fps 12\n", None),
        ("| fps | 5 |", None),  # the line is not complete
    ],
)
def test_speed_that_a_trainer_prints_is_read(output: Path, text: str, speed: float | None) -> None:
    progress = Progress(output)
    append(output, text)
    progress.poll([])
    assert progress.steps_per_second == speed


def test_latest_printed_speed_counts(output: Path) -> None:
    progress = Progress(output)
    append(output, "| fps | 100 |\n| fps | 20")
    progress.poll([])
    assert progress.steps_per_second == 100
    append(output, "0 |\n")
    progress.poll([])
    assert progress.steps_per_second == 200


def test_last_line_is_plain_text_with_words(output: Path) -> None:
    progress = Progress(output)
    append(output, "\x1b[1mstep\x1b[0m 1\n----------\n\n")
    progress.poll([])
    assert progress.last_line == "step 1"
    append(output, "10 %\r20 %\r30 %\n")  # a progress bar
    progress.poll([])
    assert progress.last_line == "30 %"


def test_only_the_end_of_a_large_output_is_read(output: Path) -> None:
    progress = Progress(output)
    append(output, "| fps | 5 |\n" + "x" * 2_000_000 + "\nend\n")
    progress.poll([])
    assert (progress.last_line, progress.steps_per_second) == ("end", None)


def test_output_that_is_written_anew_is_read_from_its_start(output: Path) -> None:
    progress = Progress(output)
    append(output, "a long first line\n")
    progress.poll([])
    output.write_text("second\n")
    progress.poll([])
    assert progress.last_line == "second"


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Path]:
    """The metrics.jsonl of a run, which this process keeps open as a trainer does."""
    path = tmp_path / "my-run" / "metrics.jsonl"
    path.parent.mkdir()
    with path.open("a"):
        yield path


def record(step: int, wall: float, kind: str = "iteration") -> str:
    return json.dumps({"kind": kind, "step": step, "wall": wall}) + "\n"


def test_speed_of_an_unidle_run_is_that_of_its_last_30_seconds(output: Path, metrics: Path) -> None:
    progress = Progress(output)
    append(metrics, record(100, 10.0) + record(200, 20.0) + record(300, 21.0, "evaluation") + '{"kind"')
    progress.poll([psutil.Process()])
    assert progress.run == metrics.parent
    assert progress.steps_per_second == 10
    append(metrics, ": 1}\n" + "".join(record(200 + 50 * i, 20.0 + i) for i in range(1, 61)))
    progress.poll([])  # the file is known by now
    assert progress.steps_per_second == 50


def test_run_of_another_process_is_not_taken_for_the_job(output: Path, metrics: Path) -> None:
    progress = Progress(output)
    progress.poll([psutil.Process().parent()])
    assert progress.run is None
