"""What a Python user does with the library, from training to prediction, on environments that take moments."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cli_envs import Choice
from own_networks import wide

import unidle
from unidle.api import fitted
from unidle.config import Config
from unidle.engine.checkpoint.run_folder import load_checkpoint, save_checkpoint
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV
from unidle.envs.make import env_maker
from unidle.envs.pool.slot import episode_seed
from unidle.report.dashboard.view import state_of
from unidle.report.history import read_history
from unidle.timeline import PHASES

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 2,
    "net_arch": (8,),
    "timesteps": 96,
    "eval_every": 32,
    "eval_episodes": 2,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}
WAYS: dict[str, Any] = {
    "id": "CartPole-v1",
    "class": Choice,
    "lambda": lambda: Choice(),
    "module:callable": "cli_envs:Choice",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(env: Any = Choice, **settings: Any) -> unidle.TrainedRun:
    return unidle.train(env, **{**SMALL, **settings})


def weights(run: unidle.TrainedRun) -> dict[str, torch.Tensor]:
    """The policy in the latest checkpoint."""
    latest = run.folder.latest()
    assert latest is not None
    policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return policy


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def iterations(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == "iteration"]


def evaluations(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == "evaluation"]


# -- train, load, resume, evaluate, predict --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_name_an_environment_leads_through_the_whole_life_of_a_run(way: str) -> None:
    env = WAYS[way]
    again = {"env": env} if way == "lambda" else {}
    run = train(env)
    assert [record["step"] for record in iterations(run)] == [32, 64, 96]
    assert run.summary()["step"] == 96
    assert run.report.exists()

    loaded = unidle.load(run.path, **again)
    assert loaded.evaluate(3).returns == run.evaluate(3).returns
    space = run.agent.obs_layout.space
    assert run.agent.action_layout.space.contains(loaded.predict(space.sample()))

    resumed = unidle.resume(run.path, timesteps=160, quiet=True, **again)
    assert [record["step"] for record in iterations(resumed)] == [32, 64, 96, 128, 160]


def test_an_environment_made_by_a_lambda_must_be_passed_again_for_what_needs_it() -> None:
    run = train(WAYS["lambda"])
    loaded = unidle.load(run.path)
    assert loaded.predict(np.array([1, 0], np.float32)) in (0, 1)
    for call in (loaded.evaluate, lambda: unidle.resume(run.path, quiet=True)):
        with pytest.raises(
            unidle.UsageError, match=r"environment was the Python object <.*lambda>+; pass it again as env="
        ):
            call()


def test_arguments_of_the_environment_reach_it_in_training_and_afterwards() -> None:
    run = train("cli_envs:Choice", env_kwargs={"answer": 1})
    other = unidle.load(run.path, env=Choice)
    assert run.maker().kwargs == other.maker().kwargs == {"answer": 1}
    assert run.evaluate(4).returns == other.evaluate(4).returns
    # The right answers are swapped, so of ten questions an episode gets the rest right.
    straight = unidle.load(run.path, env=lambda answer: Choice())
    assert [10 - n for n in straight.evaluate(4).returns] == run.evaluate(4).returns


def test_an_environment_with_other_spaces_is_refused() -> None:
    run = train()
    with pytest.raises(unidle.UsageError, match="does not have the spaces that"):
        unidle.load(run.path, env=lambda: gymnasium.make("CartPole-v1")).evaluate(1)


def test_predict_takes_the_action_that_evaluation_takes() -> None:
    run = train("CartPole-v1", normalize_obs=True)
    env = gymnasium.make("CartPole-v1")
    for index, expected in enumerate(run.evaluate(3, seed=5).returns):
        observation, _ = env.reset(seed=episode_seed(5, FIRST_EVALUATION_ENV + index, 0))
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(run.predict(observation))
            total, ended = total + float(reward), terminated or truncated
        assert total == expected


def test_predict_samples_only_when_asked_to() -> None:
    run = train("Pendulum-v1", timesteps=32)
    observation = np.array([1, 0, 0], np.float32)
    assert len({float(run.predict(observation)[0]) for _ in range(5)}) == 1
    assert len({float(run.predict(observation, deterministic=False)[0]) for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "observation", [np.zeros(3, np.float32), np.zeros((1, 2), np.float32), 1.0, "up", {"a": 1}, None]
)
def test_an_observation_that_does_not_fit_gets_a_sentence(observation: Any) -> None:
    with pytest.raises(unidle.UsageError, match="observation does not fit the space Box"):
        train().predict(observation)


def test_evaluation_is_repeatable_and_its_seed_counts() -> None:
    run = train("Pendulum-v1", timesteps=32)
    assert run.evaluate(3) == run.evaluate(3) == unidle.load(run.path).evaluate(3)
    assert run.evaluate(3, seed=7) != run.evaluate(3)
    assert run.evaluate(2, seed=1, deterministic=False) == run.evaluate(2, seed=1, deterministic=False)
    with pytest.raises(unidle.UsageError, match="0 episodes are too few"):
        run.evaluate(0)
    for seed in (-1, 2**63):
        with pytest.raises(unidle.UsageError, match=f"`seed` is {seed}; it must be between"):
            run.evaluate(1, seed=seed)
    assert run.evaluate(1, seed=2**63 - 1).episodes == 1


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_recurrent_policy_remembers_until_it_is_reset(kind: str) -> None:
    run = train("Pendulum-v1", timesteps=32, recurrent=kind, recurrent_size=4)
    observation = np.array([1, 0, 0], np.float32)
    fresh, later = float(run.predict(observation)[0]), float(run.predict(observation)[0])
    assert fresh != later
    run.agent.reset()
    assert [float(run.predict(observation)[0]) for _ in range(2)] == [fresh, later]


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_get_the_records_as_they_are_written() -> None:
    seen: list[dict[str, Any]] = []
    judged: list[dict[str, Any]] = []
    run = train(
        after_iteration=[lambda context: seen.append(context.record)],
        after_evaluation=[lambda context: judged.append(context.record)],
    )
    assert seen == iterations(run)
    assert judged == evaluations(run)
    assert len(seen) == len(judged) == 3


def test_a_callback_can_stop_the_run_which_is_then_saved_and_resumable() -> None:
    def stop_at_64(context: unidle.CallbackContext) -> None:
        if context.record["step"] >= 64:
            context.stop()

    run = train(after_iteration=[stop_at_64], timesteps=1000, eval_every=0)
    assert [record["step"] for record in iterations(run)] == [32, 64]
    assert load_checkpoint(run.folder.latest())["step"] == 64
    assert len(iterations(unidle.resume(run.path, timesteps=96, quiet=True))) == 3


def test_the_last_iteration_is_written_down_also_where_the_stop_came_too_late_for_it() -> None:
    def stop_at_160(context: unidle.CallbackContext) -> None:
        if context.record["step"] == 160:
            context.stop()

    run = train(after_iteration=[stop_at_160], timesteps=10**8, eval_every=0)  # of so many, one in 1,000 steps is
    assert [record["step"] for record in iterations(run)] == [160]


def test_an_error_in_a_callback_reaches_the_caller_and_leaves_no_process_behind() -> None:
    def fail(context: unidle.CallbackContext) -> None:
        assert children()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(after_iteration=[fail], subproc=True, workers=2)
    assert not children()


def test_a_report_that_cannot_be_written_does_not_hide_why_training_failed(tmp_path: Path) -> None:
    def fail(context: unidle.CallbackContext) -> None:
        (tmp_path / "runs/a/report.html").mkdir()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(after_iteration=[fail], run_name="a")


def children() -> set[str]:
    """Processes this one has started and not seen end."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_training_leaves_no_process_behind() -> None:
    workers: list[int] = []
    train(subproc=True, workers=2, after_evaluation=[lambda context: workers.append(len(children()))])
    assert min(workers) >= 2
    assert not children()


# -- the best, and the end -------------------------------------------------------------------------------------------


class Eager(gymnasium.Env):
    """Ten steps, a reward of 1 for each action 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return np.zeros(1, np.float32), float(action), self._steps >= 10, False, {}


def prefer(actions: dict[int, int]) -> Callable[[unidle.CallbackContext], None]:
    """A callback that makes the policy prefer that action after that step: what it learned is overwritten."""

    def overwrite(context: unidle.CallbackContext) -> None:
        with torch.no_grad():
            context.policy.actor_head.bias.copy_(torch.eye(2)[actions[context.record["step"]]] * 10)

    return overwrite


def test_the_best_policy_is_the_one_that_evaluated_best_not_the_last() -> None:
    preferences = {32: 0, 64: 1, 96: 0, 128: 0}
    run = train(Eager, timesteps=128, learning_rate=1e-9, after_iteration=[prefer(preferences)])
    assert [record["eval/return_mean"] for record in evaluations(run)] == [0, 10, 0, 0]
    assert [record["eval/best"] for record in evaluations(run)] == [True, True, False, False]
    assert run.agent.step == 64
    assert run.evaluate(2).returns == [10, 10]
    summary = run.summary()
    assert (summary["best_evaluation"], summary["final_evaluation"]) == (10, 0)
    assert load_checkpoint(run.folder.latest())["step"] == 128


class Shaped(Eager):
    """Succeeds by action 1, which pays less than action 0."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        seen, reward, *ends, _ = super().step(action)
        return seen, 2 - reward, *ends, {"is_success": bool(action)}


def test_where_success_is_told_it_decides_which_policy_is_the_best() -> None:
    preferences = {32: 0, 64: 1, 96: 0, 128: 1}
    run = train(Shaped, timesteps=128, learning_rate=1e-9, after_iteration=[prefer(preferences)])
    assert [record["eval/return_mean"] for record in evaluations(run)] == [20, 10, 20, 10]
    assert [record["eval/best"] for record in evaluations(run)] == [True, True, False, False]
    assert run.agent.step == 64
    assert run.summary()["best_evaluation"] == 10


def test_a_run_stopped_by_its_target_return_has_reached_it_though_another_policy_is_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"timesteps": 128, "learning_rate": 1e-9, "target_return": 15.0}
    run = train(Shaped, after_iteration=[prefer({32: 1, 64: 0})], **settings)
    assert (run.agent.step, run.summary()["step"]) == (32, 64)
    assert state_of(read_history(run.path), is_training=False) == "done"
    unidle.resume(run.path, env=Shaped)
    assert "target return is already reached" in capsys.readouterr().err


@pytest.mark.parametrize(("then", "best"), [(0, 64), (1, 96)])
def test_a_checkpoint_of_before_success_decided_goes_on_from_the_success_of_its_best(then: int, best: int) -> None:
    """Its best one, by return alone, is that of step 64; after it comes one that succeeds as rarely, or always."""
    run = train(Shaped, timesteps=64, learning_rate=1e-9, after_iteration=[prefer({32: 0, 64: 0})])
    path = run.folder.latest()
    older = {k: v for k, v in load_checkpoint(path).items() if k not in ("format", "best_success", "highest_return")}
    save_checkpoint(path, {**older, "best_step": 64, "best_return": 20.0})
    run.folder.save_best({**load_checkpoint(run.folder.best), "step": 64})
    resumed = unidle.resume(run.path, env=Shaped, quiet=True, timesteps=96, after_iteration=[prefer({96: then})])
    assert resumed.agent.step == best
    assert load_checkpoint(resumed.folder.latest())["highest_return"] == 20


def test_progress_counts_to_the_end_of_the_last_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(timesteps=100, quiet=False)  # 32 an iteration
    lines = capsys.readouterr().err.splitlines()
    assert any(" ".join(line.split()) == "steps 100, rounded up to whole iterations: 128" for line in lines)
    counts = [match for line in lines if (match := re.search(r"(\S+ %) +step (\S+) of (\S+)", line))]
    assert counts[-1].groups() == ("100 %", "128", "128")
    assert read_history(run.path).progress == "100 % of 128"
    resumed = unidle.resume(run.path, env=Choice, timesteps=160)
    assert "whole iterations" not in capsys.readouterr().err
    assert read_history(resumed.path).progress == "100 % of 160"


def test_without_evaluations_the_latest_policy_is_used() -> None:
    run = train(eval_every=0)
    assert evaluations(run) == []
    assert run.agent.step == 96


def test_reaching_the_target_return_ends_the_run() -> None:
    preferences = {32: 0, 64: 1, 96: 1}
    run = train(Eager, learning_rate=1e-9, after_iteration=[prefer(preferences)], target_return=9.5)
    assert [record["step"] for record in iterations(run)] == [32, 64]
    assert run.evaluate(1).returns == [10]


def test_a_little_training_learns_a_little_task() -> None:
    run = train(timesteps=4096, eval_every=512, learning_rate=0.01, n_epochs=4)
    assert run.evaluate(5).mean_return == 10


def test_a_run_that_diverges_says_so_and_keeps_the_last_good_checkpoint() -> None:
    with pytest.raises(unidle.TrainingError, match=r"Learning diverged: .* the last good checkpoint is kept in .*a/ch"):
        train("Pendulum-v1", learning_rate=1e30, run_name="a", timesteps=3200, checkpoint_every=32)
    run = unidle.load("runs/a")
    assert run.report.exists()
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    assert np.isfinite(run.predict(np.array([1, 0, 0], np.float32))).all()


# -- networks of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [wide, "own_networks:wide"], ids=["factory", "module:callable"])
def test_a_network_of_ones_own_is_trained_loaded_and_resumed(network: Any) -> None:
    run = train(network=network)
    assert weights(run)["encoder.module.0.weight"].shape == (5, 2)
    assert run.config.recipe.network == "own_networks:wide"
    whole = train(network=network, timesteps=160)
    resumed = unidle.resume(run.path, timesteps=160, quiet=True)
    assert same(weights(resumed), weights(whole))
    assert unidle.load(run.path).evaluate(2).episodes == 2


def test_a_network_that_has_no_name_must_be_passed_again() -> None:
    def narrow(observation_space: Any, action_space: Any) -> torch.nn.Module:
        return torch.nn.Linear(2, 3)

    run = train(network=narrow)
    with pytest.raises(
        unidle.UsageError, match=r"narrow> is not a module:callable; pass the factory again, as network="
    ):
        unidle.load(run.path)
    loaded = unidle.load(run.path, network=narrow)
    assert weights(loaded)["encoder.module.weight"].shape == (3, 2)
    assert loaded.evaluate(2).returns == run.evaluate(2).returns
    resumed = unidle.resume(run.path, network=narrow, timesteps=160, quiet=True)
    assert len(iterations(resumed)) == 5


def test_a_network_that_was_changed_since_is_refused_with_a_sentence() -> None:
    run = train(network=lambda observation_space, action_space: torch.nn.Linear(2, 3))
    other = lambda observation_space, action_space: torch.nn.Linear(2, 4)  # noqa: E731
    sentence = r"^The checkpoint's weights do not fit the network \(size mismatch for .*; use the --network it was"
    with pytest.raises(unidle.UsageError, match=sentence):
        unidle.load(run.path, network=other).evaluate(1)
    with pytest.raises(unidle.UsageError, match=sentence):
        unidle.resume(run.path, network=other, timesteps=160, quiet=True)


def test_a_network_that_gives_no_features_gets_a_sentence_before_a_folder_is_made(tmp_path: Path) -> None:
    class Flat(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return observation.sum()

    with pytest.raises(unidle.UsageError, match=r"must map a batch of observations to a \[batch, features\] tensor"):
        train(network=lambda observation_space, action_space: Flat())
    assert list(tmp_path.iterdir()) == []


# -- the same again --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, second, other = (weights(train("CartPole-v1", seed=seed)) for seed in (3, 3, 4))
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize(
    "engine", [{"subproc": True, "workers": 1}, {"subproc": True, "workers": 2}, {"subproc": None}], ids=str
)
def test_engine_settings_do_not_change_the_weights(engine: dict[str, Any]) -> None:
    recipe = {"n_envs": 3, "batch_size": 24, "normalize_obs": True, "normalize_reward": True}
    here = train("CartPole-v1", subproc=False, **recipe)
    there = train("CartPole-v1", **engine, **recipe)
    assert same(weights(here), weights(there))
    assert [r["eval/return_mean"] for r in evaluations(here)] == [r["eval/return_mean"] for r in evaluations(there)]


def test_how_often_it_is_evaluated_and_saved_does_not_change_the_weights() -> None:
    often = train("CartPole-v1", eval_every=32, checkpoint_every=32)
    never = train("CartPole-v1", eval_every=0, checkpoint_every=1000)
    assert same(weights(often), weights(never))


def test_the_config_file_of_a_run_reproduces_it() -> None:
    recipe = {"seed": 5, "gamma": 0.9, "lr_schedule": "linear", "normalize_obs": True, "share_trunk": True}
    run = train("CartPole-v1", **recipe, env_kwargs={"max_episode_steps": 20})
    again = unidle.train("CartPole-v1", config=run.path / "config.yaml", run_name="again", quiet=True)
    assert again.path != run.path
    assert same(weights(run), weights(again))


def test_settings_override_the_file_and_the_file_the_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("n_steps: 8\ngamma: 0.9\n")
    few = {"batch_size": 16, "n_epochs": 1, "net_arch": (8,), "timesteps": 1, "eval_every": 0, "quiet": True}
    run = unidle.train(Choice, preset="fast", config="mine.yaml", gamma=0.5, **few)
    recipe = run.config.recipe
    assert (recipe.n_envs, recipe.n_steps, recipe.gamma) == (16, 8, 0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_env": 2}, "there is no setting `n_env`; did you mean `n_envs`?"),
        ({"n_envs": "many"}, "`n_envs` must be an integer, not 'many'"),
        ({"batch_size": 33}, "Batch size 33 does not divide n_envs × n_steps = 2 × 16 = 32; use 32"),
        ({"preset": "nope"}, "There is no preset `nope`"),
        ({"config": "nope.yaml"}, "There is no file nope.yaml"),
        ({"network": "nowhere:net"}, "Module `nowhere` cannot be found"),
    ],
)
def test_a_wrong_setting_is_refused_before_a_folder_is_made(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(unidle.UsageError) as refusal:
        train(**settings)
    assert sentence in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "settings", "overlap"),
    [
        ("CartPole-v1", {"n_envs": 48}, "strict"),
        ("CartPole-v1", {"n_envs": 47}, "off"),
        ("CartPole-v1", {"n_envs": 48, "device": "cpu"}, "off"),
        ("CartPole-v1", {"n_envs": 48, "subproc": False}, "off"),
        ("CartPole-v1", {"n_envs": 48, "overlap": "off"}, "off"),
        ("CartPole-v1", {"n_envs": 2, "overlap": "strict"}, "strict"),
        ("Pendulum-v1", {"n_envs": 48, "algo": "sac"}, "off"),
        ("unidle/CartPole-v1", {"n_envs": 48}, "off"),
        ("unidle/CartPole-v1", {"n_envs": 48, "workers": 2}, "strict"),
        (lambda: Choice(), {"n_envs": 48}, "strict"),
        (lambda: gymnasium.make_vec("CartPole-v1", 48), {"n_envs": 48}, "off"),
    ],
)
def test_beside_a_gpu_many_environments_go_on_while_it_learns_unless_told_otherwise(
    env: Any, settings: dict[str, Any], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_gpu(name: str) -> torch.device:
        return torch.device("cpu" if name == "cpu" else "cuda")

    monkeypatch.setattr(unidle.api, "choose_device", with_a_gpu)
    config, notes = fitted(Config().with_values(settings, "test"), env_maker(env, {}))
    assert config.recipe.overlap == overlap
    assert [note[:18] for note in notes] == ["overlap is strict:"] * (overlap == "strict" and "overlap" not in settings)


def test_a_run_says_whether_it_overlaps(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(preset="fast", n_envs=48, batch_size=48)
    assert run.config.recipe.overlap == "off", "there is no GPU in it"
    assert "overlap" not in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_run_of_many_environments_overlaps_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(preset="fast", n_envs=48, batch_size=48, device="cuda", timesteps=10 * 48 * 16)
    assert run.config.recipe.overlap == "strict"
    assert "Textbook PPO is --overlap off." in capsys.readouterr().err
    assert run.records[-1]["step"] == 10 * 48 * 16


@pytest.mark.parametrize(
    "settings", [{"gamma": 0.5}, {"n_envs": 4}, {"n_steps": 5}, {"seed": 9}, {"env_kwargs": {"answer": 1}}]
)
def test_resume_refuses_to_change_the_recipe(settings: dict[str, Any]) -> None:
    run = train()
    before = (run.path / "config.yaml").read_text()
    with pytest.raises(unidle.UsageError, match=f"keeps its recipe, but {next(iter(settings))} would change it"):
        unidle.resume(run.path, quiet=True, **settings)
    assert (run.path / "config.yaml").read_text() == before


@pytest.mark.parametrize("settings", [{"run_name": "other"}, {"runs_dir": "elsewhere"}])
def test_a_resumed_run_stays_where_it_is(settings: dict[str, Any]) -> None:
    run = train()
    with pytest.raises(unidle.UsageError, match=r"A resumed run stays in runs/.*; remove run_name and runs_dir"):
        unidle.resume(run.path, quiet=True, **settings)
    assert unidle.load(run.path).config == run.config


def test_a_folder_without_a_run_or_checkpoint_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(unidle.UsageError, match=r"nowhere is not a run folder \(it has no config.yaml\)"):
        unidle.load("nowhere")
    run = train(run_name="a")
    for checkpoint in run.folder.checkpoints.iterdir():
        checkpoint.unlink()
    with pytest.raises(unidle.UsageError, match="has no checkpoint yet; train it with: unidle train --resume runs/a"):
        unidle.load("runs/a")


# -- what is said and logged ----------------------------------------------------------------------------------------


def test_quiet_silences_progress_but_not_messages(capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    assert "".join(capsys.readouterr()) == ""
    unidle.resume(run.path, quiet=True)
    assert capsys.readouterr() == ("", "All 96 steps are done; raise --timesteps to train further.\n")


def test_the_summary_tells_the_figures_of_the_records() -> None:
    run = train()
    summary, last = run.summary(), iterations(run)[-1]
    assert summary["wall_seconds"] >= last["wall"]
    assert summary["steps_per_second"] == 96 / last["wall"]
    assert summary["training_return"] == last["rollout/return_mean"]
    assert summary["seconds"] == {part: last[f"time/{part}"] for part in PHASES}
    json.dumps(summary)


def test_tensorboard_events_hold_the_records() -> None:
    run = train(tensorboard=True)
    (events,) = (run.path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for name in (b"rollout/return_mean", b"train/policy_loss", b"eval/return_mean", b"time/environment"):
        assert name in content
    assert not (train().path / "tensorboard").exists()


def test_wandb_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(wandb=True, timesteps=64, run_name="watched")
    (log,) = (run.path / "wandb").glob("offline-run-*/run-watched-*.wandb")
    content = log.read_bytes()
    assert b"rollout/return_mean" in content
    assert b"eval/return_mean" in content
    assert b"net_arch" in content  # the config is there too


def test_the_metrics_are_plain_json_with_a_record_per_iteration_and_evaluation() -> None:
    run = train()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["iteration", "evaluation"] * 3
    assert os.path.getsize(run.report) > 1000


# -- metric writers ----------------------------------------------------------------------------------------------------


class Returns:
    """A metric writer that keeps steps and fails from `fails_from` on."""

    def __init__(self, fails_from: float = float("inf")) -> None:
        self.steps, self.fails_from, self.is_closed = list[int](), fails_from, False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self.fails_from:
            raise OSError("disk full")
        assert all(type(value) is float for value in metrics.values())
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_a_users_writer_gets_every_record_and_is_closed() -> None:
    writer = Returns()
    run = train(writers=[writer])
    assert writer.steps == [record["step"] for record in run.records]
    assert writer.is_closed


def test_a_users_writer_that_raises_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Returns(fails_from=0)
    run = train(writers=[writer])
    assert run.records[-1]["step"] >= run.config.run.timesteps
    said = capsys.readouterr().err
    assert said.count("The metric writer Returns failed and gets no more metrics (OSError: disk full)") == 1


def test_the_old_name_of_the_callback_context_still_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"unidle\.Moment is now unidle\.CallbackContext"):
        assert unidle.Moment is unidle.CallbackContext
