"""Run folders are numbered as in Stable-Baselines3, also for scripts that start at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unidle.errors import UsageError
from unidle.sb3.run_folders import reserve_folder


def test_number_after_the_highest_is_taken(tmp_path: Path) -> None:
    assert reserve_folder(tmp_path / "logs", "PPO") == tmp_path / "logs" / "PPO_1"
    (tmp_path / "logs" / "PPO_7").mkdir()
    assert reserve_folder(tmp_path / "logs", "PPO").name == "PPO_8"
    assert reserve_folder(tmp_path / "logs", "SAC").name == "SAC_1"


@pytest.mark.parametrize("other", ["PPO_20_steps.zip", "PPO_1_old", "PPO_final", "my_PPO_4", "PPO_"])
def test_other_names_in_the_folder_do_not_count(other: str, tmp_path: Path) -> None:
    (tmp_path / other).touch()
    assert reserve_folder(tmp_path, "PPO").name == "PPO_1"


def test_name_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "logs[1]"
    assert [reserve_folder(folder, "a[b]*").name for _ in range(2)] == ["a[b]*_1", "a[b]*_2"]


def test_each_of_many_at_once_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: reserve_folder(tmp_path, "PPO"), range(64)))
    assert sorted(paths) == sorted(tmp_path / f"PPO_{number}" for number in range(1, 65))


@pytest.mark.parametrize("name", ["a/b", "..", "", "a\nb"])
def test_name_that_is_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`tb_log_name` is .*tensorboard_log for its parent"):
        reserve_folder(tmp_path, name)


def test_parent_that_is_a_file_is_refused_with_the_argument_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="pass another tensorboard_log"):
        reserve_folder(tmp_path / "file", "PPO")
