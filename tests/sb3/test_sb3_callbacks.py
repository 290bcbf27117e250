"""Callbacks: ours, and those of Stable-Baselines3, called for every step once an iteration is complete."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_envs import Choice

from unidle.errors import UsageError
from unidle.metrics.jsonl import read_records
from unidle.sb3 import PPO, make_vec_env
from unidle.sb3.common import callbacks as own

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 3, "device": "cpu"}


@pytest.fixture(params=["unidle.sb3", "stable_baselines3"])
def callbacks(request: pytest.FixtureRequest) -> Any:
    """The module of callbacks, ours or theirs."""
    if request.param == "stable_baselines3":
        pytest.importorskip(request.param)
    return importlib.import_module(f"{request.param}.common.callbacks")


def model(**changes: Any) -> PPO:
    return PPO("MlpPolicy", make_vec_env(Choice, 2), **{**SMALL, **changes})


class Trace(own.BaseCallback):
    """Records what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.steps: list[int] = []
        self.dones: list[np.ndarray] = []
        self.episodes: list[dict[str, Any]] = []
        self.rewards = np.zeros(2)

    def _on_training_start(self) -> None:
        self.calls.append(f"start of {self.locals['total_timesteps']}")

    def _on_rollout_start(self) -> None:
        self.calls.append("rollout")

    def _on_step(self) -> bool:
        self.steps.append(self.num_timesteps)
        self.dones.append(self.locals["dones"])
        self.episodes += [info["episode"] for info in self.locals["infos"] if "episode" in info]
        self.rewards = self.rewards + self.locals["rewards"]
        return True

    def _on_rollout_end(self) -> None:
        self.calls.append("update")

    def _on_training_end(self) -> None:
        self.calls.append("end")


def test_callback_sees_every_step_of_every_iteration() -> None:
    trace = Trace()
    model().learn(64, trace)
    assert trace.calls == ["start of 64", "rollout", "update", "rollout", "update", "end"]
    assert trace.steps == list(range(2, 66, 2))
    assert trace.n_calls == 32
    ends = np.flatnonzero(np.array(trace.dones)[:, 0])
    assert ends.tolist() == [9, 19, 29]  # episodes have ten steps, also across iterations
    assert [episode["l"] for episode in trace.episodes] == [10] * 6
    assert sum(episode["r"] for episode in trace.episodes) <= trace.rewards.sum()


def test_function_and_list_are_callbacks_too() -> None:
    traces, calls = [Trace(), Trace()], []
    learner = model().learn(32, [*traces, lambda locals_, globals_: calls.append(locals_["self"])])
    assert [len(trace.steps) for trace in traces] == [16, 16]
    assert calls == [learner] * 16
    with pytest.raises(UsageError, match="pass a BaseCallback"):
        model().learn(32, 5)


def test_false_ends_training_after_the_iteration() -> None:
    learner, seen = model(), []

    def stop(locals_: dict[str, Any], _: dict[str, Any]) -> bool:
        seen.append(learner.num_timesteps)
        return learner.num_timesteps < 40

    learner.learn(320, stop)
    assert seen[-1] == 40
    assert learner.num_timesteps == 64


def test_model_is_saved_at_the_counts_that_were_asked_for(callbacks: Any, tmp_path: Path) -> None:
    model().learn(64, callbacks.CheckpointCallback(save_freq=10, save_path=str(tmp_path / "saved"), name_prefix="a"))
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["a_20_steps.zip", "a_40_steps.zip", "a_60_steps.zip"]
    assert PPO.load(tmp_path / "saved" / names[0]).num_timesteps == 32  # as the iteration left it


def test_model_is_evaluated_and_the_best_kept(callbacks: Any, tmp_path: Path) -> None:
    evaluation = callbacks.EvalCallback(
        make_vec_env(Choice, 2),
        eval_freq=16,
        n_eval_episodes=4,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
        warn=False,
    )
    learner = model(tensorboard_log=str(tmp_path / "runs")).learn(64, evaluation)
    with np.load(tmp_path / "evaluations.npz") as results:
        assert results["timesteps"].tolist() == [32, 64]
        assert results["results"].shape == results["ep_lengths"].shape == (2, 4)
        assert evaluation.best_mean_reward == results["results"].mean(1).max()
    assert PPO.load(tmp_path / "best_model").num_timesteps in (32, 64)
    records = read_records(Path(str(learner.logger.dir)) / "metrics.jsonl")
    logged = [record["eval/mean_reward"] for record in records if "eval/mean_reward" in record]
    assert len(logged) == 2
    assert logged[-1] == evaluation.last_mean_reward


def test_training_stops_at_the_reward_threshold(callbacks: Any) -> None:
    stop = callbacks.StopTrainingOnRewardThreshold(reward_threshold=-1.0)
    evaluation = callbacks.EvalCallback(
        make_vec_env(Choice, 1), callback_on_new_best=stop, eval_freq=16, verbose=0, warn=False
    )
    assert model().learn(320, evaluation).num_timesteps == 32


def test_training_stops_without_improvement(callbacks: Any) -> None:
    stop = callbacks.StopTrainingOnNoModelImprovement(max_no_improvement_evals=1)
    evaluation = callbacks.EvalCallback(
        make_vec_env(Choice, 1), callback_after_eval=stop, eval_freq=8, n_eval_episodes=1, verbose=0, warn=False
    )
    evaluation.best_mean_reward = 1e6
    assert model().learn(320, evaluation).num_timesteps < 320


def test_training_stops_after_so_many_episodes(callbacks: Any) -> None:
    learner = model().learn(320, callbacks.StopTrainingOnMaxEpisodes(max_episodes=4))
    assert learner.num_timesteps == 96  # 4 episodes of 10 steps in each of 2 environments


def test_callback_is_called_every_so_many_steps(callbacks: Any) -> None:
    steps: list[int] = []
    count = callbacks.ConvertCallback(lambda locals_, _: steps.append(locals_["self"].num_timesteps) or True)
    model().learn(64, callbacks.EveryNTimesteps(n_steps=20, callback=count))
    assert steps == [20, 40, 60]


def test_threshold_without_evaluations_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the results of an EvalCallback"):
        model().learn(32, own.StopTrainingOnRewardThreshold(1.0))


def test_numbers_that_a_callback_logs_are_in_the_metrics(tmp_path: Path) -> None:
    class Logs(own.BaseCallback):
        def _on_step(self) -> bool:
            self.logger.record("my/step", self.num_timesteps)
            self.logger.record_mean("my/mean", self.num_timesteps)
            return True

    learner = model(tensorboard_log=str(tmp_path)).learn(64, Logs())
    records = [each for each in read_records(Path(str(learner.logger.dir)) / "metrics.jsonl") if "my/step" in each]
    assert [(each["step"], each["my/step"], each["my/mean"]) for each in records] == [(32, 32, 17), (64, 64, 49)]


def test_error_in_a_callback_keeps_what_was_learned() -> None:
    def fail(locals_: dict[str, Any], _: dict[str, Any]) -> None:
        if locals_["self"].num_timesteps == 64:
            raise RuntimeError("enough")

    learner = model()
    with pytest.raises(RuntimeError, match="enough"):
        learner.learn(320, fail)
    assert learner.num_timesteps == 64
    learner.learn(32, reset_num_timesteps=False)
    assert learner.num_timesteps == 96


def test_error_at_the_end_of_training_keeps_what_was_learned() -> None:
    class Fails(Trace):
        def _on_training_end(self) -> None:
            raise RuntimeError("enough")

    learner = model()
    before = learner.get_parameters()["policy"]["action_net.weight"]
    with pytest.raises(RuntimeError, match="enough"):
        learner.learn(32, Fails())
    assert not torch.equal(learner.get_parameters()["policy"]["action_net.weight"], before)
    trace = Trace()
    learner.learn(32, trace, reset_num_timesteps=False)
    assert trace.steps == list(range(34, 66, 2))


def test_callback_that_fails_to_start_is_not_ended() -> None:
    class Fails(Trace):
        def _init_callback(self) -> None:
            raise RuntimeError("no start")

        def _on_training_end(self) -> None:
            self.opened_at_start.close()

    with pytest.raises(RuntimeError, match="no start"):
        model().learn(32, Fails())


def test_open_episodes_continue_with_their_returns() -> None:
    first, second = Trace(), Trace()
    learner = model().learn(32, first)  # 16 steps of each environment
    learner.learn(32, reset_num_timesteps=False)
    learner.learn(32, second, reset_num_timesteps=False)  # steps 33 to 48
    assert [episode["l"] for episode in second.episodes] == [10, 10]
    at_once = Trace()
    model().learn(96, at_once)
    assert [episode["r"] for episode in second.episodes] == [episode["r"] for episode in at_once.episodes[-2:]]


def test_statistics_are_copied_to_the_evaluation_and_stay_those_of_training() -> None:
    normalize = pytest.importorskip("stable_baselines3.common.vec_env").VecNormalize
    training, evaluating = (normalize(make_vec_env(Choice, 2)) for _ in range(2))
    evaluation = own.EvalCallback(evaluating, eval_freq=16, n_eval_episodes=4, verbose=0)
    PPO("MlpPolicy", training, **SMALL).learn(64, evaluation)
    assert training.obs_rms.count == pytest.approx(64 + 2, abs=0.01)
    assert evaluating.obs_rms.count > training.obs_rms.count
    assert evaluating.obs_rms is not training.obs_rms


@pytest.mark.parametrize("normalised", ["training", "evaluation"])
def test_normaliser_on_one_side_only_is_refused(normalised: str) -> None:
    normalize = pytest.importorskip("stable_baselines3.common.vec_env").VecNormalize
    training, evaluating = make_vec_env(Choice, 2), make_vec_env(Choice, 2)
    if normalised == "training":
        training = normalize(training)
    else:
        evaluating = normalize(evaluating)
    with pytest.raises(UsageError, match=r"has a VecNormalize.*wrap both"):
        PPO("MlpPolicy", training, **SMALL).learn(32, own.EvalCallback(evaluating, eval_freq=16))


def test_progress_bar_ends_with_training(capfd: pytest.CaptureFixture[str]) -> None:
    model().learn(64, own.ProgressBarCallback())
    assert "100%" in capfd.readouterr().out


def test_latest_episodes_are_in_the_model_while_a_callback_listens() -> None:
    learner = model(stats_window_size=3).learn(64, Trace())
    assert [episode["l"] for episode in learner.ep_info_buffer] == [10, 10, 10]


def test_logs_are_written_every_so_many_steps(tmp_path: Path) -> None:
    class Logs(own.BaseCallback):
        def _on_step(self) -> bool:
            self.logger.record("my/step", self.num_timesteps)
            return True

    learner = model(tensorboard_log=str(tmp_path)).learn(32, [Logs(), own.LogEveryNTimesteps(8)])
    records = read_records(Path(str(learner.logger.dir)) / "metrics.jsonl")
    assert [each["my/step"] for each in records if "my/step" in each] == [8, 16, 24, 32]
