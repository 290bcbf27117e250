"""Models: learning, learning further, acting, parameters, and files."""

from __future__ import annotations

import gc
import inspect
import io
import os
import signal
import weakref
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cli_envs import Choice
from toy_envs import Walk

from unidle.errors import UsageError
from unidle.metrics.jsonl import read_records
from unidle.sb3 import DQN, PPO, SAC, TD3, make_vec_env
from unidle.sb3.fixed_argument import FixedArgument

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}
SMALL["policy_kwargs"] = {"net_arch": [8]}
SMALL_DQN: dict[str, Any] = {"learning_starts": 8, "buffer_size": 64, "batch_size": 4, "seed": 3, "device": "cpu"}


def ppo(env: Any = Choice, **changes: Any) -> PPO:
    return PPO("MlpPolicy", make_vec_env(env, 2), **{**SMALL, **changes})


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            assert_equal(value, right[name])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name


def test_learn_returns_the_model_and_counts_steps() -> None:
    model = ppo()
    assert model.num_timesteps == 0
    assert model.learn(40) is model
    assert model.num_timesteps == 64  # whole iterations of 32
    model.learn(32)
    assert model.num_timesteps == 32


def test_learning_in_two_parts_equals_learning_at_once() -> None:
    at_once = ppo(Walk).learn(128)
    in_parts = ppo(Walk).learn(64)
    in_parts.learn(64, reset_num_timesteps=False)
    assert in_parts.num_timesteps == at_once.num_timesteps == 128
    assert_equal(at_once.get_parameters(), in_parts.get_parameters())


def test_replay_buffer_is_kept_between_two_calls_of_learn() -> None:
    at_once = DQN("MlpPolicy", make_vec_env(Walk, 1), **SMALL_DQN).learn(64)
    in_parts = DQN("MlpPolicy", make_vec_env(Walk, 1), **SMALL_DQN).learn(32)
    in_parts.learn(32, reset_num_timesteps=False)
    # Exploration follows the length of the run, so that only the first half is the same.
    assert at_once.num_timesteps == in_parts.num_timesteps
    state = in_parts._state()["algo"]["experience"]
    assert (state["steps"], state["updates"]) == (64, 14)


def test_replay_buffer_of_the_previous_run_is_freed_when_the_next_begins() -> None:
    model = DQN("MlpPolicy", make_vec_env(Walk, 1), **SMALL_DQN).learn(32)
    before = weakref.ref(model._state()["algo"]["experience"]["memory"]["obs"])
    alive: list[bool] = []
    model.learn(8, callback=lambda locals_, _: alive.append(before() is not None), reset_num_timesteps=False)
    assert alive == [False] * 8


def test_run_that_cannot_start_leaves_the_model_as_it_was() -> None:
    model = ppo().learn(64)
    before = model.get_parameters()
    model.set_env(make_vec_env(Walk, 2))
    with pytest.raises(UsageError, match="spaces differ"):
        model.learn(32)
    assert model.num_timesteps == 64
    assert_equal(model.get_parameters(), before)


def test_learn_that_resets_counts_starts_from_the_learned_networks_with_new_episodes() -> None:
    model = ppo(Walk).learn(64)
    before = model.get_parameters()["policy"]
    starts: list[Any] = []
    model.learn(32, callback=lambda locals_, _: starts.append(locals_["rewards"].tolist()))
    fresh: list[Any] = []
    ppo(Walk).learn(32, callback=lambda locals_, _: fresh.append(locals_["rewards"].tolist()))
    assert starts != fresh
    after = model.get_parameters()["policy"]
    assert 0 < (after["action_net.weight"] - before["action_net.weight"]).abs().max() < 0.1


def test_untrained_model_acts_as_the_run_begins() -> None:
    model, other = ppo(), ppo()
    observation = Choice().reset(seed=0)[0]
    action, state = model.predict(observation, deterministic=True)
    assert model.action_space.contains(action)
    assert state is None
    untrained = model.get_parameters()["policy"]
    assert_equal(model.learn(32).get_parameters(), other.learn(32).get_parameters())
    assert not torch.equal(untrained["action_net.weight"], model.get_parameters()["policy"]["action_net.weight"])


def test_batches_are_predicted_as_in_the_loop_of_a_script() -> None:
    model = ppo().learn(32)
    env = model.get_env()
    observations = env.reset()
    for _ in range(12):
        actions, _ = model.predict(observations)
        observations, rewards, dones, infos = env.step(actions)
    assert observations.shape == (2, *model.observation_space.shape)
    assert rewards.shape == dones.shape == (2,)
    assert len(infos) == 2


def test_nothing_is_left_behind_without_a_log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ppo().learn(32)
    folder = Path(model.logger.dir)
    assert list(folder.iterdir()) == []
    del model
    gc.collect()
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_log_folder_gets_a_run_folder_per_learn_that_resets(tmp_path: Path) -> None:
    (tmp_path / "PPO_20_steps.zip").touch()
    model = ppo(tensorboard_log=str(tmp_path)).learn(32)
    model.learn(32, reset_num_timesteps=False)
    model.learn(32, tb_log_name="mine")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["PPO_1", "mine_1"]
    steps = [record["step"] for record in read_records(tmp_path / "PPO_1" / "metrics.jsonl")]
    assert steps == [32, 64]
    assert list((tmp_path / "PPO_1" / "tensorboard").iterdir())


def test_log_folder_given_later_gets_a_run_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "PPO_1").mkdir()
    model = ppo().learn(32)
    model.tensorboard_log = str(tmp_path)
    model.learn(32, reset_num_timesteps=False)
    assert [record["step"] for record in read_records(tmp_path / "PPO_2" / "metrics.jsonl")] == [64]


def test_callback_that_is_none_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass a BaseCallback"):
        ppo(tensorboard_log=str(tmp_path)).learn(32, callback=5)
    assert not list(tmp_path.iterdir())


def test_quiet_model_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = ppo().learn(32)
    model.learn(32, reset_num_timesteps=False)
    assert capfd.readouterr() == ("", "")


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_that_are_set_act_and_are_learned_from() -> None:
    source, target = ppo(seed=1).learn(32), ppo(seed=2)
    target.set_parameters(source.get_parameters())
    assert_equal(source.get_parameters(), target.get_parameters())
    observations = np.stack([Choice().reset(seed=seed)[0] for seed in range(8)])
    assert np.array_equal(*(model.predict(observations, deterministic=True)[0] for model in (source, target)))
    target.learn(32)
    ours, theirs = (model.get_parameters()["policy"]["action_net.weight"] for model in (target, source))
    assert 0 < (ours - theirs).abs().max() < 0.1


def test_some_parameters_are_set_without_exact_match() -> None:
    source, target = ppo(seed=1), ppo(seed=2)
    given = {"policy": source.get_parameters()["policy"]}
    with pytest.raises(UsageError, match="pass those that get_parameters returns"):
        target.set_parameters(given)
    target.set_parameters(given, exact_match=False)
    assert_equal(target.get_parameters()["policy"], given["policy"])


def test_parameters_of_other_layers_are_refused() -> None:
    other = ppo(policy_kwargs={"net_arch": [4]})
    model = ppo()
    with pytest.raises(UsageError, match="pass parameters of the same network"):
        model.set_parameters(other.get_parameters())
    assert model.get_parameters()["policy"]["action_net.weight"].shape == (2, 8)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("set_parameters", lambda model: model.set_parameters(model.get_parameters())),
        ("set_env", lambda model: model.set_env(make_vec_env(Choice, 2))),
        ("learn", lambda model: model.learn(32)),
    ],
)
def test_model_is_not_changed_while_it_learns(name: str, change: Any) -> None:
    model = ppo()
    with pytest.raises(UsageError, match=f"`{name}` has no effect while `learn` is running"):
        model.learn(32, callback=lambda locals_, _: change(model))
    change(model)


def test_arguments_can_be_read_under_their_names() -> None:
    model = ppo(learning_rate=1e-3, clip_range=0.1, target_kl=0.5)
    found = model.learning_rate, model.clip_range, model.target_kl, model.n_steps, model.batch_size, model.gamma
    assert found == (1e-3, 0.1, 0.5, 16, 16, 0.99)
    dqn = DQN("MlpPolicy", make_vec_env(Walk, 2), n_steps=3, train_freq=4, gradient_steps=2, **SMALL_DQN)
    assert (dqn.n_steps, dqn.train_freq, dqn.gradient_steps, dqn.target_update_interval) == (3, 4, 2, 10_000)
    assert (dqn.buffer_size, dqn.learning_starts, dqn.exploration_final_eps) == (64, 8, 0.05)


@pytest.mark.parametrize("algorithm", [PPO, SAC, TD3, DQN], ids=lambda algorithm: algorithm.__name__)
def test_arguments_cannot_be_assigned(algorithm: type) -> None:
    fixed = [name for name, value in inspect.getmembers(algorithm) if isinstance(value, FixedArgument)]
    assert {"learning_rate", "gamma", "batch_size", "n_steps"} <= set(fixed)
    assert set(fixed) <= set(inspect.signature(algorithm).parameters)
    env = Choice() if algorithm in (PPO, DQN) else "Pendulum-v1"
    model = algorithm("MlpPolicy", env, device="cpu")
    for name in fixed:
        value = getattr(model, name)
        with pytest.raises(UsageError, match=rf"`{name}` cannot be assigned; .* load\(path, {name}=…\)"):
            setattr(model, name, value)


# -- files -------------------------------------------------------------------------------------------------------------


def test_saved_model_acts_and_learns_further(tmp_path: Path) -> None:
    model = ppo().learn(32)
    model.save(tmp_path / "new" / "model")
    loaded = PPO.load(tmp_path / "new" / "model", env=make_vec_env(Choice, 2))
    assert loaded.num_timesteps == 32
    assert_equal(loaded.get_parameters(), model.get_parameters())
    loaded.learn(32, reset_num_timesteps=False)
    assert loaded.num_timesteps == 64


def test_model_without_environment_acts_but_does_not_learn(tmp_path: Path) -> None:
    file = io.BytesIO()
    model = ppo().learn(32)
    model.save(file)
    loaded = PPO.load(file)
    observation = Choice().reset(seed=1)[0]
    ours, theirs = (each.predict(observation, deterministic=True)[0] for each in (loaded, model))
    assert ours == theirs
    assert loaded.get_env() is None
    with pytest.raises(UsageError, match="no environment yet"):
        loaded.learn(32)
    loaded.set_env(make_vec_env(Choice, 2))
    loaded.learn(32)


def test_arguments_given_to_load_replace_saved_ones(tmp_path: Path) -> None:
    ppo(learning_rate=lambda remaining: 1e-3 * remaining).save(tmp_path / "a.zip")
    with pytest.warns(UserWarning, match="`learning_rate` of the saved model is a Python object"):
        assert PPO.load(tmp_path / "a.zip").config.recipe.learning_rate == 1e-3
    loaded = PPO.load(tmp_path / "a.zip", env=make_vec_env(Choice, 4), learning_rate=1e-4, n_steps=8)
    found: Any = loaded.config.recipe
    assert (found.learning_rate, found.n_steps, found.n_envs, found.n_epochs) == (1e-4, 8, 4, 2)
    loaded.learn(32)


def test_custom_objects_for_playing_leave_the_saved_values(tmp_path: Path) -> None:
    ppo(learning_rate=lambda remaining: 1e-3 * remaining, clip_range=0.3).save(tmp_path / "a")
    idiom = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0, "gamma": 0.9}
    with pytest.warns(UserWarning, match="must be above 0") as caught:
        loaded = PPO.load(tmp_path / "a", custom_objects=idiom)
    messages = sorted(str(each.message) for each in caught)
    assert [message.split(" is ")[0] for message in messages] == [
        "`clip_range` in custom_objects",
        "`learning_rate` in custom_objects",
    ]
    assert {each.filename for each in caught} == {__file__}
    assert (loaded.learning_rate, loaded.clip_range, loaded.gamma) == (1e-3, 0.3, 0.9)


def test_replay_buffer_is_not_saved_and_refilled(tmp_path: Path) -> None:
    model = DQN("MlpPolicy", make_vec_env(Walk, 1), **SMALL_DQN).learn(32)
    model.save(tmp_path / "a")
    assert (tmp_path / "a.zip").stat().st_size < 100_000
    loaded = DQN.load(tmp_path / "a", env=make_vec_env(Walk, 2))
    assert loaded.config.recipe.updates_per_iteration == model.config.recipe.updates_per_iteration
    loaded.learn(32)


def test_file_with_pickled_code_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    ppo().save(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as good, zipfile.ZipFile(tmp_path / "b.zip", "w") as bad:
        bad.writestr("unidle.json", good.read("unidle.json"))
        tensors = io.BytesIO()
        torch.save({"algo": Trap()}, tensors)
        bad.writestr("state.pt", tensors.getvalue())
    with pytest.raises(UsageError, match="is damaged"):
        PPO.load(tmp_path / "b.zip")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "There is no model"), ("text.zip", "a zip-file"), ("dqn", "DQN.load")]
)
def test_file_that_is_no_such_model_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("hello")
    DQN("MlpPolicy", Choice(), **SMALL_DQN).save(tmp_path / "dqn")
    with pytest.raises(UsageError, match=message):
        PPO.load(tmp_path / name)


# -- environments ------------------------------------------------------------------------------------------------------


def test_other_environments_are_trained_in_from_then_on() -> None:
    model = ppo().learn(32)
    other = make_vec_env(Choice, 2)
    model.set_env(other)
    assert model.get_env() is other
    model.learn(32, reset_num_timesteps=False)
    assert model.num_timesteps == 64
    with pytest.raises(UsageError, match="has 2 environments, but got 3"):
        model.set_env(make_vec_env(Choice, 3))


def test_environments_with_other_spaces_are_refused_before_training() -> None:
    model = ppo().learn(32)
    model.set_env(make_vec_env(Walk, 2))
    with pytest.raises(UsageError, match="spaces differ"):
        model.learn(32)


def test_ctrl_c_ends_learn_with_what_was_learned() -> None:
    model = ppo()

    def interrupt(locals_: dict[str, Any], _: dict[str, Any]) -> None:
        if model.num_timesteps == 64:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        model.learn(320, callback=interrupt)
    assert 64 <= model.num_timesteps < 320
    model.predict(Choice().reset(seed=1)[0])


@pytest.mark.learning
def test_cartpole_is_learned_with_only_the_import_changed() -> None:
    from unidle.sb3 import evaluate_policy

    env = gymnasium.make("CartPole-v1")
    model = PPO("MlpPolicy", env, seed=1).learn(total_timesteps=40_000)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=20)
    assert mean > 300


@pytest.mark.learning
def test_pendulum_is_learned_by_sac() -> None:
    from unidle.sb3 import evaluate_policy

    small: dict[str, Any] = {"batch_size": 64, "policy_kwargs": {"net_arch": [64, 64]}}
    model = SAC("MlpPolicy", "Pendulum-v1", learning_rate=2e-3, seed=1, **small).learn(4_000)
    mean, _ = evaluate_policy(model, gymnasium.make("Pendulum-v1"), n_eval_episodes=10)
    assert mean > -400  # that of random actions is about -1200


def test_settings_that_are_not_learned_from_are_saved_unless_excluded(tmp_path: Path) -> None:
    model = ppo(verbose=0, tensorboard_log=str(tmp_path / "runs"))
    model.verbose = 2
    model.save(tmp_path / "model", exclude=["tensorboard_log"])
    loaded = PPO.load(tmp_path / "model")
    assert (loaded.verbose, loaded.tensorboard_log) == (2, None)
    assert PPO.load(tmp_path / "model", verbose=1).verbose == 1


def test_update_schedule_may_be_changed_by_load(tmp_path: Path) -> None:
    model = DQN("MlpPolicy", make_vec_env(Choice, 2), **SMALL_DQN, train_freq=4, target_update_interval=80)
    model.save(tmp_path / "model")
    same = DQN.load(tmp_path / "model", train_freq=4, target_update_interval=80)
    assert same.config.recipe == model.config.recipe
    other = DQN.load(tmp_path / "model", train_freq=(2, "step"), gradient_steps=-1)
    assert (other.train_freq, other.gradient_steps, other.target_update_interval) == (2, 4, 80)


def test_observation_of_reset_is_refused_with_its_info() -> None:
    env = gymnasium.make("CartPole-v1")
    model = PPO("MlpPolicy", env, **SMALL)
    with pytest.raises(UsageError, match="pass its first item"):
        model.predict(env.reset())
