"""`unidle monitor` as a real process, with the fake driver or without one."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import restore_sigint

Environment = Callable[..., dict[str, str]]
PROGRAM = [sys.executable, "-m", "unidle", "monitor"]


def monitor(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_row(text: str, reading: str) -> list[str]:
    """The cells of a row: now, min, mean, max, new/s."""
    line = next(line for line in text.splitlines() if line.startswith(f"  {reading} "))
    return line.removeprefix(f"  {reading} ").split()


@pytest.fixture(scope="module")
def once_output(fake_driver: Environment, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, str]]]:
    """The table and the CSV rows of `unidle monitor --once` with two GPUs."""
    folder = tmp_path_factory.mktemp("monitor")
    done = monitor(folder, "--once", "--csv", "a.csv", "--interval", "0.05", env=fake_driver())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, rows(folder / "a.csv")


def test_once_prints_table_of_every_gpu_and_host(once_output: tuple[str, list[dict[str, str]]]) -> None:
    text, _ = once_output
    assert re.findall(r"^(gpu \d|host) ", text, re.MULTILINE)[:3] == ["gpu 0", "gpu 1", "host"]
    large = text.partition("gpu 1")[0]
    assert table_row(large, "power W")[:4] == ["210"] * 4
    assert table_row(large, "SM active %")[:4] == ["31.5"] * 4
    least, mean, largest = map(float, table_row(large, "utilisation %")[1:4])
    assert least < mean < largest
    assert "throttled by power limit, heat" in text
    assert re.search(r"4242 +37 % +1\.00 GiB", text)
    assert re.search(r"4242 +– +–", text)


def test_unavailable_readings_are_dashes(once_output: tuple[str, list[dict[str, str]]]) -> None:
    text, lines = once_output
    small = text.partition("gpu 1  Fake Small")[2].partition("host")[0]
    for reading in ("SM active %", "tensor active %", "DRAM active %", "power W", "power share %", "energy J"):
        assert table_row(small, reading) == ["–"] * 5
    assert table_row(text, "DRAM active %") == ["–"] * 5
    unavailable = {"SM active", "tensor active", "DRAM active", "power", "power share", "energy"}
    assert unavailable.isdisjoint(line["reading"] for line in lines if line["source"] == "gpu 1")


def test_csv_has_each_new_value_once_with_timestamp(once_output: tuple[str, list[dict[str, str]]]) -> None:
    _, lines = once_output
    assert list(lines[0]) == ["time", "source", "reading", "value", "unit"]
    samples = [line for line in lines if (line["source"], line["reading"]) == ("gpu 0", "utilisation")]
    numbers = [int(line["value"]) for line in samples]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 15  # one every 50 ms, for a second
    assert abs(float(samples[-1]["time"]) - time.time()) < 600
    temperatures = [line for line in lines if (line["source"], line["reading"]) == ("gpu 0", "temperature")]
    assert len(temperatures) <= 3  # of twenty polls: it never changed
    assert {line["unit"] for line in temperatures} == {"°C"}


def test_json_has_null_for_unavailable_readings(fake_driver: Environment, tmp_path: Path) -> None:
    done = monitor(tmp_path, "--json", env=fake_driver())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [gpu["model"] for gpu in found["gpus"]] == ["Fake Large", "Fake Small"]
    assert found["gpus"][0]["throttled_by"] == ["power limit", "heat"]
    assert found["sources"]["gpu 0"]["power"]["mean"] == 210.0
    assert found["sources"]["gpu 1"]["power"] is None
    assert found["sources"]["host"]["cpu"]["unit"] == "%"


@pytest.mark.parametrize("mode", ["none", "not loaded"])
def test_monitor_without_gpu_shows_reason_and_host_readings(
    mode: str, fake_driver: Environment, tmp_path: Path
) -> None:
    done = monitor(tmp_path, "--once", "--csv", "a.csv", "--pid", str(os.getpid()), env=fake_driver(mode))
    assert done.returncode == 0, done.stderr
    assert "No NVIDIA GPU found: " in done.stdout
    assert 0 <= float(table_row(done.stdout, "cpu %")[0]) <= 100
    assert f"pid {os.getpid()}  and its child processes" in done.stdout
    sources = {line["source"] for line in rows(tmp_path / "a.csv")}
    assert sources == {"host", f"pid {os.getpid()}"}


def test_lost_gpu_is_reported(fake_driver: Environment, tmp_path: Path) -> None:
    done = monitor(tmp_path, "--once", env=fake_driver("lost"))
    assert done.returncode == 0, done.stderr
    assert "gpu 0 is lost: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--interval", "0"], "--interval 0 is not between 0.01 and 60 seconds; 0.1 suits most GPUs."),
        (["--interval", "nan"], "--interval nan is not between 0.01 and 60 seconds; 0.1 suits most GPUs."),
        (
            ["--csv", "nowhere/a.csv"],
            "nowhere/a.csv cannot be written (No such file or directory); choose another",
        ),
        (
            ["--csv", "/dev/full"],
            "/dev/full cannot be written (No space left on device); choose another",
        ),
        (["--csv", "mine.txt"], "mine.txt is not empty; choose another file for --csv."),
        (["--pid", "999999999", "--csv", "a.csv"], "There is no process 999999999; run `ps` to list the running ones."),
    ],
)
def test_usage_error_is_one_line_and_creates_no_file(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    done = monitor(tmp_path, "--once", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"unidle: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def read_until(terminal: int, word: str, times: int, seconds: float = 30) -> str:
    """Read the terminal until `word` was shown that many times or the program ended."""
    shown, end = "", time.monotonic() + seconds
    while shown.count(word) < times:
        assert time.monotonic() < end, f"{word!r} is shown too rarely in {shown[-2000:]!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the other end of the terminal was closed
                break
    return shown


def test_monitor_updates_live_on_terminal_and_ends_cleanly_on_ctrl_c(fake_driver: Environment, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**fake_driver(), "TERM": "xterm", "COLUMNS": "120", "LINES": "60"}
    process = subprocess.Popen(
        [*PROGRAM, "--csv", "a.csv"],
        cwd=tmp_path,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=restore_sigint,
    )
    os.close(theirs)
    try:
        read_until(ours, "utilisation", 10)  # redrawn repeatedly
        before = len(rows(tmp_path / "a.csv"))
        read_until(ours, "utilisation", 10)
        assert len(rows(tmp_path / "a.csv")) > before > 0  # the file can be read while it grows
        process.send_signal(signal.SIGINT)
        rest = read_until(ours, "never shown", 1)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(ours)
    assert "Traceback" not in rest
    assert "unidle:" not in rest
    assert (tmp_path / "a.csv").read_text().endswith("\n")


def test_monitor_without_terminal_writes_csv_until_interrupted(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "--csv", "a.csv", "--interval", "0.02"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore_sigint,
    )
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "a.csv").exists() or len(rows(tmp_path / "a.csv")) < 20:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0
    assert (out, err) == (b"", b"")


def test_monitor_does_not_import_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom unidle.cli import main\n"
        "try: main(['monitor', '--once'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
