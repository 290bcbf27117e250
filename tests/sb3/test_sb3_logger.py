"""What a model logs: its own logger, that of Stable-Baselines3, and the files of a run, which may be none."""

from __future__ import annotations

import csv
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
from toy_envs import Walk

from unidle.sb3 import DQN, PPO, make_vec_env

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}


def ppo(**changes: Any) -> PPO:
    return PPO("MlpPolicy", make_vec_env(Walk, 2), **{**SMALL, **changes})


def test_metrics_of_the_iteration_have_the_names_of_stable_baselines3() -> None:
    model = ppo()
    seen: list[dict[str, float]] = []
    model.learn(64, callback=lambda locals_, _: seen.append(model.logger.name_to_value))
    assert {"train/policy_gradient_loss", "train/value_loss", "rollout/ep_rew_mean", "time/fps"} <= seen[-1].keys()
    assert model.logger.name_to_value["time/total_timesteps"] == 64
    model.logger.record("mine", 3)
    assert model.logger.name_to_value["mine"] == 3


@pytest.mark.parametrize(("interval", "steps"), [(1, [32, 64, 96, 128]), (2, [64, 128])])
def test_logger_of_stable_baselines3_gets_metrics_and_what_callbacks_record(
    interval: int, steps: list[int], tmp_path: Path
) -> None:
    configure = pytest.importorskip("stable_baselines3.common.logger").configure
    model = ppo()
    model.set_logger(configure(str(tmp_path), ["csv"]))

    def record(locals_: Any, _: Any) -> None:
        model.logger.record("mine/step", model.num_timesteps)

    model.learn(128, callback=record, log_interval=interval)
    with (tmp_path / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["time/total_timesteps"]) for row in rows] == steps
    assert [float(row["mine/step"]) for row in rows] == steps
    assert all(row["train/value_loss"] for row in rows)


def test_log_interval_of_dqn_counts_episodes(tmp_path: Path) -> None:
    configure = pytest.importorskip("stable_baselines3.common.logger").configure
    model = DQN("MlpPolicy", make_vec_env(Walk, 1), learning_starts=8, buffer_size=64, batch_size=4, device="cpu")
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(200, log_interval=4)
    with (tmp_path / "progress.csv").open() as file:
        episodes = [float(row["time/episodes"]) for row in csv.DictReader(file)]
    assert episodes == sorted(episodes)
    assert 1 <= len(episodes) <= model.logger.name_to_value.get("time/episodes", 200) / 4
    assert all(int(later) // 4 > int(earlier) // 4 for earlier, later in itertools.pairwise(episodes))


def test_run_without_a_log_folder_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", lambda path, *args, **kwargs: opened.append(str(path)))
    ppo().learn(64).learn(64, reset_num_timesteps=False)
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_same_weights_are_learned_with_and_without_files(tmp_path: Path) -> None:
    left = ppo().learn(64).learn(64, reset_num_timesteps=False).get_parameters()["policy"]
    right = ppo(tensorboard_log=str(tmp_path)).learn(64).learn(64, reset_num_timesteps=False).get_parameters()["policy"]
    assert all((left[name] == right[name]).all() for name in left)


def test_progress_of_a_run_without_files_names_no_folder(capfd: pytest.CaptureFixture[str]) -> None:
    ppo(verbose=1).learn(64)
    shown = "".join(capfd.readouterr())
    assert "n_envs 2" in shown
    assert "no run folder" not in shown


def test_settings_that_need_files_have_them_until_the_model_is_deleted() -> None:
    model = ppo(settings={"eval_every": 32, "eval_episodes": 1}).learn(64)
    folder = Path(model.logger.dir)
    assert (folder / "checkpoints" / "best.pt").is_file()
    del model
    gc.collect()
    assert not folder.exists()
