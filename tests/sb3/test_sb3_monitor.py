"""Monitor's file, which Stable-Baselines3's `load_results` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_envs import Choice

from unidle.errors import UsageError
from unidle.sb3 import PPO, Monitor, make_vec_env

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 3, "device": "cpu"}


class Told(Choice):
    """Episodes of two steps, with an option for reset and an entry in info."""

    def reset(self, *, seed: int | None = None, options: dict | None = None, level: int = 0) -> Any:
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, _ = super().step(action)
        return observation, reward, terminated, self._steps >= 2, {"won": True}


def play(env: Any, episodes: int = 2, **kwargs: Any) -> None:
    for _ in range(episodes):
        env.reset(**kwargs)
        env.step(0)
        env.step(0)


def test_file_is_what_load_results_reads(tmp_path: Path) -> None:
    load_results = pytest.importorskip("stable_baselines3.common.monitor").load_results
    env = Monitor(Told(), str(tmp_path), reset_keywords=("level",), info_keywords=("won",))
    play(env, level=3)
    found = load_results(str(tmp_path))
    assert list(found.columns) == ["index", "r", "l", "t", "level", "won"]
    assert found.l.tolist() == [2, 2]
    assert found.level.tolist() == [3, 3]


@pytest.mark.parametrize(("override", "episodes"), [(True, 2), (False, 4)])
def test_existing_file_is_continued_only_if_asked_to(override: bool, episodes: int, tmp_path: Path) -> None:
    for _ in range(2):
        env = Monitor(Told(), str(tmp_path / "log"), override_existing=override)
        play(env)
        env.close()
    lines = (tmp_path / "log.monitor.csv").read_text().splitlines()
    assert lines[1] == "r,l,t"
    assert len(lines) == 2 + episodes


def test_reset_without_a_keyword_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`level` in reset_keywords; pass it to reset"):
        Monitor(Told(), str(tmp_path), reset_keywords=("level",)).reset()


def test_each_environment_has_a_file_that_a_second_learn_continues(tmp_path: Path) -> None:
    vec_env = make_vec_env(Told, 2, monitor_dir=str(tmp_path / "logs"))
    model = PPO("MlpPolicy", vec_env, **SMALL).learn(32)
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == ["0.monitor.csv", "1.monitor.csv"]
    before = len(files[1].read_text().splitlines())
    assert before >= 8
    model.learn(32)
    assert len(files[1].read_text().splitlines()) >= before + 8
