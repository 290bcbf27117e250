"""The file of episodes in the form of Stable-Baselines3's Monitor."""

from __future__ import annotations

import os
from pathlib import Path

from stable_baselines3.common.monitor import load_results

from unidle.metrics.monitor_csv import MonitorCsv


def test_episodes_are_spread_over_the_time_since_the_last_call(tmp_path: Path) -> None:
    monitor = MonitorCsv(tmp_path / "monitor.csv", "A-v0", [], 0, 10.0, print)
    monitor.write([(1.0, 5), (2.0, 6)], 12.0)
    monitor.write([], 13.0)
    monitor.write([(3.123456789, 7)], 15.0)
    monitor.close()
    lines = (tmp_path / "monitor.csv").read_text().splitlines()
    assert lines[1:] == ["r,l,t", "1.0,5,11.000000", "2.0,6,12.000000", "3.123457,7,15.000000"]
    assert load_results(str(tmp_path))["l"].tolist() == [5, 6, 7]


def test_resumed_file_keeps_its_header_and_the_rows_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "monitor.csv"
    first = MonitorCsv(path, "A-v0", ["x"], 0, 0.0, print)
    first.write([(1.0, 5, 0.5), (2.0, 6, float("nan")), (3.0, 7, 1.5)], 3.0)
    first.close()
    before = path.read_text().splitlines()
    second = MonitorCsv(path, "A-v0", ["x"], 2, 2.5, print)
    second.write([(9.0, 9, 9.5)], 3.5)
    second.close()
    assert path.read_text().splitlines() == [*before[:4], "9.0,9,3.500000,9.5"]
    third = MonitorCsv(path, "A-v0", ["x"], 7, 4.0, print)  # rows are missing: nothing to cut
    third.close()
    assert len(path.read_text().splitlines()) == 5


def test_full_disk_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    monitor = MonitorCsv(tmp_path / "monitor.csv", "A-v0", [], 0, 0.0, said.append)
    monitor.write([(0.0, 1)], 0.5)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, monitor._file.fileno())
    os.close(full)
    for wall in (1.0, 2.0):
        monitor.write([(1.0, 5)], wall)
    monitor.close()
    assert len(said) == 1
    assert "monitor.csv gets no more episodes (No space left on device); training continues." in said[0]
