"""The Python API: train, load, resume, evaluate, predict, callbacks, networks and writers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import wandb
from cli_envs import Choice
from custom_networks import wide
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import unidle
from unidle.api import fit_to_env
from unidle.config import Config
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint
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
ENVIRONMENTS: dict[str, Any] = {
    "id": "CartPole-v1",
    "class": Choice,
    "lambda": lambda: Choice(),
    "module:callable": "cli_envs:Choice",
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(env: Any = Choice, **settings: Any) -> unidle.TrainedRun:
    return unidle.train(env, **{**SMALL, **settings})


def weights(run: unidle.TrainedRun) -> dict[str, torch.Tensor]:
    """The policy in the latest checkpoint."""
    latest = run.folder.latest()
    assert latest is not None
    policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return policy


def equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def iterations(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == "iteration"]


def evaluations(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == "evaluation"]


# -- train, load, resume, evaluate, predict --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_train_load_predict_and_resume_accept_every_kind_of_env(kind: str) -> None:
    env = ENVIRONMENTS[kind]
    env_again = {"env": env} if kind == "lambda" else {}
    run = train(env)
    assert [record["step"] for record in iterations(run)] == [32, 64, 96]
    assert run.summary()["step"] == 96
    assert run.report.exists()

    loaded = unidle.load(run.path, **env_again)
    assert loaded.evaluate(3).returns == run.evaluate(3).returns
    space = run.agent.obs_layout.space
    assert run.agent.action_layout.space.contains(loaded.predict(space.sample())[0])

    resumed = unidle.resume(run.path, timesteps=160, quiet=True, **env_again)
    assert [record["step"] for record in iterations(resumed)] == [32, 64, 96, 128, 160]


def test_lambda_env_must_be_passed_again_to_evaluate_and_resume() -> None:
    run = train(ENVIRONMENTS["lambda"])
    loaded = unidle.load(run.path)
    assert loaded.predict(np.array([1, 0], np.float32))[0] in (0, 1)
    for call in (loaded.evaluate, lambda: unidle.resume(run.path, quiet=True)):
        with pytest.raises(
            unidle.UsageError, match=r"environment was the Python object <.*lambda>+; pass it again as env="
        ):
            call()


def test_env_kwargs_are_used_in_training_and_evaluation() -> None:
    run = train("cli_envs:Choice", env_kwargs={"answer": 1})
    other = unidle.load(run.path, env=Choice)
    assert run.maker().kwargs == other.maker().kwargs == {"answer": 1}
    assert run.evaluate(4).returns == other.evaluate(4).returns
    # The correct actions are swapped, so the return is 10 minus the other one.
    unswapped = unidle.load(run.path, env=lambda answer: Choice())
    assert [10 - n for n in unswapped.evaluate(4).returns] == run.evaluate(4).returns


def test_load_with_other_spaces_raises() -> None:
    run = train()
    with pytest.raises(unidle.UsageError, match="does not have the spaces that"):
        unidle.load(run.path, env=lambda: gymnasium.make("CartPole-v1")).evaluate(1)


def test_predict_matches_evaluate() -> None:
    run = train("CartPole-v1", normalize_obs=True)
    env = gymnasium.make("CartPole-v1")
    for index, expected in enumerate(run.evaluate(3, seed=5).returns):
        observation, _ = env.reset(seed=episode_seed(5, FIRST_EVALUATION_ENV + index, 0))
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(run.predict(observation)[0])
            total, ended = total + float(reward), terminated or truncated
        assert total == expected


def test_predict_is_deterministic_by_default() -> None:
    run = train("Pendulum-v1", timesteps=32)
    observation = np.array([1, 0, 0], np.float32)
    assert len({float(run.predict(observation)[0][0]) for _ in range(5)}) == 1
    assert len({float(run.predict(observation, deterministic=False)[0][0]) for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "observation",
    [np.zeros(3, np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 1, 2)), 1.0, "up", {"a": 1}, None],
)
def test_predict_with_mismatched_observation_raises(observation: Any) -> None:
    with pytest.raises(unidle.UsageError, match="observation does not fit the space Box"):
        train().predict(observation)


def test_evaluate_is_reproducible_and_depends_on_seed() -> None:
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
def test_recurrent_policy_keeps_state_until_reset(kind: str) -> None:
    run = train("Pendulum-v1", timesteps=32, recurrent=kind, recurrent_size=4)
    observation = np.array([1, 0, 0], np.float32)
    agent = run.agent
    fresh, later = float(agent.predict(observation)[0]), float(agent.predict(observation)[0])
    assert fresh != later
    agent.reset()
    assert [float(agent.predict(observation)[0]) for _ in range(2)] == [fresh, later]


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_receive_written_records() -> None:
    iteration_records: list[dict[str, Any]] = []
    evaluation_records: list[dict[str, Any]] = []
    run = train(
        after_iteration=[lambda context: iteration_records.append(context.record)],
        after_evaluation=[lambda context: evaluation_records.append(context.record)],
    )
    assert iteration_records == iterations(run)
    assert evaluation_records == evaluations(run)
    assert len(iteration_records) == len(evaluation_records) == 3


def test_callback_can_stop_run_and_run_can_be_resumed() -> None:
    def stop_at_64(context: unidle.CallbackContext) -> None:
        if context.record["step"] >= 64:
            context.stop()

    run = train(after_iteration=[stop_at_64], timesteps=1000, eval_every=0)
    assert [record["step"] for record in iterations(run)] == [32, 64]
    assert load_checkpoint(run.folder.latest())["step"] == 64
    assert len(iterations(unidle.resume(run.path, timesteps=96, quiet=True))) == 3


def test_last_iteration_is_recorded_when_callback_stops_run() -> None:
    def stop_at_160(context: unidle.CallbackContext) -> None:
        if context.record["step"] == 160:
            context.stop()

    run = train(after_iteration=[stop_at_160], timesteps=10**8, eval_every=0)  # otherwise recorded every 1,000 steps
    assert [record["step"] for record in iterations(run)] == [160]


def test_callback_error_is_raised_and_workers_exit() -> None:
    def fail(context: unidle.CallbackContext) -> None:
        assert child_processes()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(after_iteration=[fail], subproc=True, workers=2)
    assert not child_processes()


def test_report_write_error_does_not_mask_training_error(tmp_path: Path) -> None:
    def fail(context: unidle.CallbackContext) -> None:
        (tmp_path / "runs/a/report.html").mkdir()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(after_iteration=[fail], run_name="a")


def child_processes() -> set[str]:
    """Ids of the running child processes."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_workers_exit_after_training() -> None:
    workers: list[int] = []
    train(subproc=True, workers=2, after_evaluation=[lambda context: workers.append(len(child_processes()))])
    assert min(workers) >= 2
    assert not child_processes()


# -- best policy and end of training ---------------------------------------------------------------------------------


class ActionReward(gymnasium.Env):
    """Episodes of ten steps; the reward is the action, 0 or 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return np.zeros(1, np.float32), float(action), self._steps >= 10, False, {}


def prefer(actions: dict[int, int]) -> Callable[[unidle.CallbackContext], None]:
    """A callback that overwrites the actor's bias after each step so that the policy prefers the given action."""

    def overwrite(context: unidle.CallbackContext) -> None:
        with torch.no_grad():
            context.policy.actor_head.bias.copy_(torch.eye(2)[actions[context.record["step"]]] * 10)

    return overwrite


def test_best_evaluated_policy_is_kept_not_the_last() -> None:
    preferences = {32: 0, 64: 1, 96: 0, 128: 0}
    run = train(ActionReward, timesteps=128, learning_rate=1e-9, after_iteration=[prefer(preferences)])
    assert [record["eval/return_mean"] for record in evaluations(run)] == [0, 10, 0, 0]
    assert [record["eval/best"] for record in evaluations(run)] == [True, True, False, False]
    assert run.agent.step == 64
    assert run.evaluate(2).returns == [10, 10]
    summary = run.summary()
    assert (summary["best_evaluation"], summary["final_evaluation"]) == (10, 0)
    assert load_checkpoint(run.folder.latest())["step"] == 128


class SuccessByAction(ActionReward):
    """Action 1 succeeds but earns less than action 0."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, *ends, _ = super().step(action)
        return observation, 2 - reward, *ends, {"is_success": bool(action)}


def test_best_policy_is_chosen_by_success_if_reported() -> None:
    preferences = {32: 0, 64: 1, 96: 0, 128: 1}
    run = train(SuccessByAction, timesteps=128, learning_rate=1e-9, after_iteration=[prefer(preferences)])
    assert [record["eval/return_mean"] for record in evaluations(run)] == [20, 10, 20, 10]
    assert [record["eval/best"] for record in evaluations(run)] == [True, True, False, False]
    assert run.agent.step == 64
    assert run.summary()["best_evaluation"] == 10


def test_target_return_ends_run_even_if_another_policy_has_more_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"timesteps": 128, "learning_rate": 1e-9, "target_return": 15.0}
    run = train(SuccessByAction, after_iteration=[prefer({32: 1, 64: 0, 96: 0})], **settings)
    assert (run.agent.step, run.summary()["step"]) == (32, 96)  # reached at 64, in effect an iteration later
    assert state_of(read_history(run.path), is_training=False) == "done"
    unidle.resume(run.path, env=SuccessByAction)
    assert "target return is already reached" in capsys.readouterr().err


@pytest.mark.parametrize(("next_action", "best"), [(0, 64), (1, 96)])
def test_resume_of_old_checkpoint_compares_with_success_of_its_best(next_action: int, best: int) -> None:
    """Its best policy, chosen by return, is from step 64; the next one never succeeds, or always."""
    run = train(SuccessByAction, timesteps=64, learning_rate=1e-9, after_iteration=[prefer({32: 0, 64: 0})])
    path = run.folder.latest()
    older = {k: v for k, v in load_checkpoint(path).items() if k not in ("format", "best_success", "highest_return")}
    save_checkpoint(path, {**older, "best_step": 64, "best_return": 20.0})
    run.folder.save_best({**load_checkpoint(run.folder.best), "step": 64})
    resumed = unidle.resume(
        run.path, env=SuccessByAction, quiet=True, timesteps=96, after_iteration=[prefer({96: next_action})]
    )
    assert resumed.agent.step == best
    assert load_checkpoint(resumed.folder.latest())["highest_return"] == 20


def test_progress_total_is_rounded_up_to_whole_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(timesteps=100, quiet=False)  # 32 per iteration
    lines = capsys.readouterr().err.splitlines()
    assert any(" ".join(line.split()) == "steps 100, rounded up to whole iterations: 128" for line in lines)
    counts = [match for line in lines if (match := re.search(r"(\S+ %) +step (\S+) of (\S+)", line))]
    assert counts[-1].groups() == ("100 %", "128", "128")
    assert read_history(run.path).progress == "100 % of 128"
    resumed = unidle.resume(run.path, env=Choice, timesteps=160)
    assert "whole iterations" not in capsys.readouterr().err
    assert read_history(resumed.path).progress == "100 % of 160"


def test_latest_policy_is_used_without_evaluations() -> None:
    run = train(eval_every=0)
    assert evaluations(run) == []
    assert run.agent.step == 96


def test_target_return_ends_run() -> None:
    preferences = {32: 0, 64: 1, 96: 1}
    run = train(ActionReward, learning_rate=1e-9, after_iteration=[prefer(preferences)], target_return=9.5)
    assert [record["step"] for record in iterations(run)] == [32, 64, 96]  # reached at 64
    assert run.evaluate(1).returns == [10]


def test_ppo_solves_choice_env() -> None:
    run = train(timesteps=4096, eval_every=512, learning_rate=0.01, n_epochs=4)
    assert run.evaluate(5).mean_return == 10


def test_diverged_run_raises_and_keeps_last_good_checkpoint() -> None:
    with pytest.raises(unidle.TrainingError, match=r"Learning diverged: .* the last good checkpoint is kept in .*a/ch"):
        train("Pendulum-v1", learning_rate=1e30, run_name="a", timesteps=3200, checkpoint_every=32)
    run = unidle.load("runs/a")
    assert run.report.exists()
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    assert np.isfinite(run.predict(np.array([1, 0, 0], np.float32))[0]).all()


# -- custom networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [wide, "custom_networks:wide"], ids=["factory", "module:callable"])
def test_custom_network_trains_loads_and_resumes(network: Any) -> None:
    run = train(network=network)
    assert weights(run)["encoder.module.0.weight"].shape == (5, 2)
    assert run.config.recipe.network == "custom_networks:wide"
    uninterrupted = train(network=network, timesteps=160)
    resumed = unidle.resume(run.path, timesteps=160, quiet=True)
    assert equal_weights(weights(resumed), weights(uninterrupted))
    assert unidle.load(run.path).evaluate(2).episodes == 2


def test_unnamed_network_must_be_passed_again() -> None:
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


def test_changed_network_raises_on_load_and_resume() -> None:
    run = train(network=lambda observation_space, action_space: torch.nn.Linear(2, 3))
    other = lambda observation_space, action_space: torch.nn.Linear(2, 4)  # noqa: E731
    message = r"^The checkpoint's weights do not fit the network \(size mismatch for .*; use the --network it was"
    with pytest.raises(unidle.UsageError, match=message):
        unidle.load(run.path, network=other).evaluate(1)
    with pytest.raises(unidle.UsageError, match=message):
        unidle.resume(run.path, network=other, timesteps=160, quiet=True)


def test_invalid_network_output_raises_before_run_folder_is_created(tmp_path: Path) -> None:
    class Flat(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return observation.sum()

    with pytest.raises(unidle.UsageError, match=r"must map a batch of observations to a \[batch, features\] tensor"):
        train(network=lambda observation_space, action_space: Flat())
    with pytest.raises(unidle.UsageError, match="must map a batch"):
        train(run_name=None, network=lambda observation_space, action_space: Flat())
    assert list(tmp_path.glob("runs/*")) == []


# -- reproducibility -------------------------------------------------------------------------------------------------


def test_seed_determines_weights() -> None:
    first, second, other = (weights(train("CartPole-v1", seed=seed)) for seed in (3, 3, 4))
    assert equal_weights(first, second)
    assert not equal_weights(first, other)


@pytest.mark.parametrize(
    "engine", [{"subproc": True, "workers": 1}, {"subproc": True, "workers": 2}, {"subproc": None}], ids=str
)
def test_engine_settings_do_not_change_weights(engine: dict[str, Any]) -> None:
    recipe = {"n_envs": 3, "batch_size": 24, "normalize_obs": True, "normalize_reward": True}
    in_process = train("CartPole-v1", subproc=False, **recipe)
    other = train("CartPole-v1", **engine, **recipe)
    assert equal_weights(weights(in_process), weights(other))
    assert [r["eval/return_mean"] for r in evaluations(in_process)] == [
        r["eval/return_mean"] for r in evaluations(other)
    ]


def test_eval_and_checkpoint_frequency_do_not_change_weights() -> None:
    often = train("CartPole-v1", eval_every=32, checkpoint_every=32)
    never = train("CartPole-v1", eval_every=0, checkpoint_every=1000)
    assert equal_weights(weights(often), weights(never))


def test_config_file_reproduces_run() -> None:
    recipe = {"seed": 5, "gamma": 0.9, "lr_schedule": "linear", "normalize_obs": True, "share_trunk": True}
    run = train("CartPole-v1", **recipe, env_kwargs={"max_episode_steps": 20})
    again = unidle.train("CartPole-v1", config=run.path / "config.yaml", run_name="again", quiet=True)
    assert again.path != run.path
    assert equal_weights(weights(run), weights(again))


def test_arguments_override_config_file_and_file_overrides_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("n_steps: 8\ngamma: 0.9\n")
    small = {"batch_size": 16, "n_epochs": 1, "net_arch": (8,), "timesteps": 1, "eval_every": 0, "quiet": True}
    run = unidle.train(Choice, preset="fast", config="mine.yaml", gamma=0.5, **small)
    recipe = run.config.recipe
    assert (recipe.n_envs, recipe.n_steps, recipe.gamma) == (16, 8, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_env": 2}, "there is no setting `n_env`; did you mean `n_envs`?"),
        ({"n_envs": "many"}, "`n_envs` must be an integer, not 'many'"),
        ({"batch_size": 33}, "Batch size 33 is larger than a rollout, n_envs × n_steps = 2 × 16 = 32; use"),
        ({"preset": "nope"}, "There is no preset `nope`"),
        ({"config": "nope.yaml"}, "There is no file nope.yaml"),
        ({"network": "nowhere:net"}, "Module `nowhere` cannot be found"),
    ],
)
def test_invalid_setting_raises_before_run_folder_is_created(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(unidle.UsageError) as refusal:
        train(**settings)
    assert message in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


class OnTensors(gymnasium.vector.VectorEnv):
    """As much of a simulator on the device as shows that it is one."""

    device = torch.device("cpu")

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


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
        (lambda: gymnasium.make_vec("CartPole-v1", 48), {"n_envs": 48}, "strict"),
        (lambda: gymnasium.make_vec("CartPole-v1", 48), {"n_envs": 48, "subproc": False}, "off"),
        (lambda: gymnasium.make_vec("CartPole-v1", 8), {"n_envs": 8}, "off"),
        (lambda: OnTensors(48), {"n_envs": 48}, "off"),
    ],
)
def test_overlap_defaults_to_strict_with_gpu_and_many_envs(
    env: Any, settings: dict[str, Any], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_gpu(name: str) -> torch.device:
        return torch.device("cpu" if name == "cpu" else "cuda")

    monkeypatch.setattr("unidle.api.job.choose_device", with_a_gpu)
    config, notes = fit_to_env(Config().with_values(settings, "test"), env_maker(env, {}))
    assert config.recipe.overlap == overlap
    assert [note[:18] for note in notes] == ["overlap is strict:"] * (overlap == "strict" and "overlap" not in settings)


def test_run_without_gpu_does_not_mention_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(preset="fast", n_envs=48, batch_size=48)
    assert run.config.recipe.overlap == "off", "there is no GPU"
    assert "overlap" not in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_run_with_many_envs_overlaps_and_prints_notice(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(preset="fast", n_envs=48, batch_size=48, device="cuda", timesteps=10 * 48 * 16)
    assert run.config.recipe.overlap == "strict"
    assert "For textbook PPO, use --overlap off." in capsys.readouterr().err
    assert run.records[-1]["step"] == 10 * 48 * 16


@pytest.mark.parametrize(
    "settings", [{"gamma": 0.5}, {"n_envs": 4}, {"n_steps": 5}, {"seed": 9}, {"env_kwargs": {"answer": 1}}]
)
def test_resume_with_changed_recipe_raises(settings: dict[str, Any]) -> None:
    run = train()
    before = (run.path / "config.yaml").read_text()
    with pytest.raises(unidle.UsageError, match=f"keeps its recipe, but {next(iter(settings))} would change it"):
        unidle.resume(run.path, quiet=True, **settings)
    assert (run.path / "config.yaml").read_text() == before


@pytest.mark.parametrize("settings", [{"run_name": "other"}, {"runs_dir": "elsewhere"}])
def test_resume_with_other_run_folder_raises(settings: dict[str, Any]) -> None:
    run = train()
    with pytest.raises(unidle.UsageError, match=r"A resumed run stays in .*/runs/.*; remove run_name and runs_dir"):
        unidle.resume(run.path, quiet=True, **settings)
    assert unidle.load(run.path).config == run.config


def test_load_without_config_or_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(unidle.UsageError, match=r"nowhere is not a run folder \(it has no config.yaml\)"):
        unidle.load("nowhere")
    run = train(run_name="a")
    for checkpoint in run.folder.checkpoints.iterdir():
        checkpoint.unlink()
    message = r"^runs/a has no checkpoint yet; train it with: unidle train --resume runs/a$"
    with pytest.raises(unidle.UsageError, match=message):
        unidle.load("runs/a")


# -- output and logs ------------------------------------------------------------------------------------------------


def test_quiet_hides_progress_but_not_messages(capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    assert "".join(capsys.readouterr()) == ""
    unidle.resume(run.path, quiet=True)
    assert capsys.readouterr() == ("", "All 96 steps are done; raise --timesteps to train further.\n")


def test_quiet_hides_remarks_but_not_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    small = {name: value for name, value in SMALL.items() if name != "net_arch"}
    unidle.train(Choice, **{**small, "preset": None, "network_arch": (8,)})
    assert capsys.readouterr().err == "`network_arch` is now `net_arch`; using it.\n"


def test_resume_of_finished_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    before = (run.path / "config.yaml").read_bytes()
    again = unidle.resume(run.path, learning_rate=1e-5, eval_every=16, quiet=True)
    assert "The settings that you changed are not used." in capsys.readouterr().err
    assert (run.path / "config.yaml").read_bytes() == before
    assert not (run.path / "changes.jsonl").exists()
    assert again.config == run.config
    longer = unidle.resume(run.path, timesteps=160, quiet=True)
    assert equal_weights(weights(longer), weights(train(timesteps=160, run_name="whole")))


def test_resume_after_reached_target_changes_nothing() -> None:
    run = train(target_return=-1e9)
    before = (run.path / "config.yaml").read_bytes()
    unidle.resume(run.path, learning_rate=1e-5, quiet=True)
    assert (run.path / "config.yaml").read_bytes() == before


def test_summary_matches_records() -> None:
    run = train()
    summary, last = run.summary(), iterations(run)[-1]
    assert summary["wall_seconds"] >= last["wall"]
    assert summary["steps_per_second"] == 96 / last["wall"]
    assert summary["training_return"] == last["rollout/return_mean"]
    end = run.records[-1]  # the evaluation at the end
    waited = summary["wall_seconds"] - end["wall"]
    in_all = {part: end[f"time/{part}"] + (waited if part == "evaluate" else 0) for part in PHASES}
    assert summary["seconds"] == pytest.approx(in_all)
    assert sum(in_all.values()) == pytest.approx(summary["wall_seconds"], rel=0.01)
    json.dumps(summary)


def test_tensorboard_events_contain_metrics() -> None:
    run = train(tensorboard=True)
    (events,) = (run.path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for name in (b"rollout/return_mean", b"train/policy_loss", b"eval/return_mean", b"time/environment"):
        assert name in content
    assert not (train().path / "tensorboard").exists()


def test_tensorboard_reads_tags_of_sb3_and_cleanrl() -> None:
    run = train(tensorboard=True, cleanrl_tags=True, timesteps=320)
    tags = EventAccumulator(str(run.path / "tensorboard")).Reload()

    def points(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in tags.Scalars(tag)]

    for theirs, ours in (
        ("rollout/ep_rew_mean", "rollout/return_mean"),
        ("rollout/ep_len_mean", "rollout/length_mean"),
        ("charts/episodic_return", "rollout/return_mean"),
        ("eval/mean_reward", "eval/return_mean"),
        ("eval/mean_ep_length", "eval/length_mean"),
        ("train/policy_gradient_loss", "train/policy_loss"),
    ):
        assert points(theirs) == points(ours) != []
    names = {"time/fps", "time/iterations", "train/value_loss", "train/entropy_loss", "train/approx_kl", "charts/SPS"}
    names |= {"train/clip_fraction", "train/explained_variance", "train/learning_rate", "losses/clipfrac"}
    assert names <= set(tags.Tags()["scalars"])
    assert {step for step, value in points("time/total_timesteps") if value != step} == set()
    assert not [name for record in run.records for name in record if name in ("time/fps", "rollout/ep_rew_mean")]


def test_wandb_offline_run_contains_metrics_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(wandb=True, timesteps=64, run_name="watched")
    (log,) = (run.path / "wandb").glob("offline-run-*/run-watched-*.wandb")
    wandb.teardown()  # W&B's service may still be writing
    content = log.read_bytes()
    assert b"rollout/return_mean" in content
    assert b"rollout/ep_rew_mean" in content
    assert b"eval/return_mean" in content
    assert b"net_arch" in content  # from the config


def test_metrics_jsonl_has_one_record_per_iteration_and_evaluation() -> None:
    run = train()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["iteration", "evaluation"] * 3
    assert os.path.getsize(run.report) > 1000


# -- metric writers ----------------------------------------------------------------------------------------------------


class StepWriter:
    """A metric writer that stores the steps and raises from step `fails_from` on."""

    def __init__(self, fails_from: float = float("inf")) -> None:
        self.steps, self.fails_from, self.is_closed = list[int](), fails_from, False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self.fails_from:
            raise OSError("disk full")
        assert all(type(value) is float for value in metrics.values())
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_custom_writer_receives_every_record_and_is_closed() -> None:
    writer = StepWriter()
    run = train(writers=[writer])
    assert writer.steps == [record["step"] for record in run.records]
    assert writer.is_closed


def test_failing_writer_does_not_end_run(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StepWriter(fails_from=0)
    run = train(writers=[writer])
    assert run.records[-1]["step"] >= run.config.run.timesteps
    output = capsys.readouterr().err
    assert output.count("The metric writer StepWriter failed and gets no more metrics (OSError: disk full)") == 1


def test_old_name_of_callback_context_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"unidle\.Moment is now unidle\.CallbackContext"):
        assert unidle.Moment is unidle.CallbackContext


class ChangesFolder(Choice):
    """Changes the working directory when it is created."""

    def __init__(self) -> None:
        super().__init__()
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")


def test_env_that_changes_working_directory_does_not_move_run_folder(tmp_path: Path) -> None:
    run = train(ChangesFolder, run_name="a")
    assert run.path == tmp_path / "runs/a"
    assert (tmp_path / "runs/a/report.html").exists()
    assert len(run.records) > 0
    os.chdir(tmp_path)
    assert unidle.resume("runs/a", timesteps=160, quiet=True).path == tmp_path / "runs/a"


def test_loaded_run_is_found_after_the_working_directory_changes(tmp_path: Path) -> None:
    train(Choice, run_name="a")
    run = unidle.load("runs/a")
    (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other")
    assert run.path == tmp_path / "runs/a"
    assert len(run.records) > 0


def test_unnamed_runs_that_start_together_get_separate_folders() -> None:
    barrier = threading.Barrier(2)

    def start_together() -> gymnasium.Env:  # both have chosen their folders when they probe the environment
        if threading.current_thread().name in ("first", "second") and not met.is_set():
            barrier.wait(60)
            met.set()
        return Choice()

    met = threading.Event()
    runs: dict[str, unidle.TrainedRun] = {}

    def run(name: str) -> None:
        runs[name] = train(start_together, run_name=None)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.path for run in runs.values()}) == 2


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_runs_in_threads_start_with_the_weights_of_their_seed(algo: str) -> None:
    def slow_network(*spaces: gymnasium.Space) -> torch.nn.Module:
        first = torch.nn.Linear(2, 8)
        in_network.wait(60)  # another run draws its weights now
        return torch.nn.Sequential(first, torch.nn.Linear(8, 8))

    own = {} if algo == "ppo" else {"preset": None, "algo": algo, "n_epochs": None, "batch_size": 8}
    settings = {
        name: value for name, value in {**SMALL, **own, "timesteps": 32, "eval_every": 0}.items() if value is not None
    }
    in_network = threading.Barrier(1)

    def initial(seed: int) -> dict[str, torch.Tensor]:
        run = unidle.train(Choice, network=slow_network, seed=seed, learning_rate=1e-12, **settings)
        return weights(run)

    alone = [initial(seed) for seed in (1, 2)]
    in_network = threading.Barrier(2)
    together: dict[int, dict[str, torch.Tensor]] = {}
    threads = [threading.Thread(target=lambda s=seed: together.update({s: initial(s)})) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal_weights(before, together[seed]) for seed, before in zip((1, 2), alone))


class Slow(Choice):
    """Slow enough that worker processes pay."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


def test_factory_that_cannot_be_pickled_is_stepped_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()

    def unpicklable() -> gymnasium.Env:
        with lock:
            return Slow()

    run = train(unpicklable, n_envs=4, n_steps=8)
    assert capsys.readouterr().err.count("Environments are stepped in this process, because the factory") == 1
    assert run.evaluate(4).episodes == 4
    with pytest.raises(unidle.UsageError, match="cannot be sent to worker processes"):
        train(unpicklable, workers=2)
