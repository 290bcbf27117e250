"""Runs that start from the networks of another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "net_arch": (8,),
    "timesteps": 64,
    "eval_every": 32,
    "eval_episodes": 1,
    "tensorboard": False,
    "device": "cpu",
    "subproc": False,
    "quiet": True,
}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {"preset": "classic", "n_epochs": 1}),
    "ppo normalised": ("CartPole-v1", {"preset": "classic", "normalize_obs": True, "normalize_reward": True}),
    "sac": ("Pendulum-v1", {"algo": "sac", "learning_starts": 16}),
    "td3": ("Pendulum-v1", {"algo": "td3", "learning_starts": 16}),
    "dqn": ("CartPole-v1", {"algo": "dqn", "learning_starts": 16}),
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(kind: str, name: str, **settings: Any) -> unidle.TrainedRun:
    env, own = ALGORITHMS[kind]
    return unidle.train(env, run_name=name, **{**SMALL, **own, **settings})


def initial_state(kind: str, name: str, **settings: Any) -> dict[str, Any]:
    """The checkpoint of step 0 of a run."""
    run = train(kind, name, on_start=[lambda context: context.stop()], **settings)
    state = final_state(run.path)
    assert state["step"] == 0
    return state


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_networks_are_taken_and_optimiser_is_new(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = train(kind, "other")
    latest = final_state(other.path)["algo"]
    fresh = initial_state(kind, "fresh")["algo"]
    capsys.readouterr()
    warm = initial_state(kind, "warm", init_from="runs/other")
    said = capsys.readouterr().err
    best = load_checkpoint(other.folder.best, policy_only=True)["algo"]["policy"]
    is_complete = kind in ("ppo normalised", "sac", "td3")
    assert_same(dict(warm["algo"]["policy"]), dict(latest["policy"] if is_complete else best))
    if "critics" in latest:
        assert_same(warm["algo"]["critics"], latest["critics"])
        assert_same(warm["algo"]["target_critics" if kind == "td3" else "targets"], latest["critics"])
        assert (
            "Starting from the policy and critics in runs/other/checkpoints/step-000000000064.pt, of step 64." in said
        )
    else:
        assert "Starting from the policy in runs/other/checkpoints/" in said
    if kind == "dqn":
        assert_same(warm["algo"]["target"], warm["algo"]["policy"])
    if kind == "ppo normalised":
        assert_same(warm["algo"]["reward_norm"], latest["reward_norm"])
    for name in ("optimiser", "optimisers"):
        assert_same(warm["algo"].get(name), fresh.get(name))
    assert unidle.load("runs/warm").config.run.init_from == str(other.path)


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_resumed_run_is_exact_and_does_not_need_the_other_folder(kind: str) -> None:
    train(kind, "other")
    train(kind, "whole", init_from="runs/other", timesteps=128)
    train(kind, "parts", init_from="runs/other", timesteps=128, after_iteration=[StopAfter(2)])
    shutil.rmtree("runs/other")
    unidle.resume("runs/parts", quiet=True)
    assert_same(final_state(Path("runs/whole")), final_state(Path("runs/parts")))


def test_overlapping_collection_starts_with_the_loaded_weights() -> None:
    train("ppo", "other")
    first, second = (train("ppo", name, init_from="runs/other", overlap="strict") for name in ("a", "b"))
    cold = train("ppo", "cold", overlap="strict")
    assert_same(final_state(first.path), final_state(second.path))
    policies = [final_state(run.path)["algo"]["policy"] for run in (first, cold)]
    assert not all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])


def test_policy_file_alone_leaves_critics_new(capsys: pytest.CaptureFixture[str]) -> None:
    other = train("sac", "other")
    shutil.copy(other.folder.best, "mine.pt")
    fresh = initial_state("sac", "fresh")["algo"]
    capsys.readouterr()
    warm = initial_state("sac", "warm", init_from="mine.pt")["algo"]
    assert "Starting from the policy in mine.pt, of step " in (said := capsys.readouterr().err)
    assert "; critics are new, because that file has none." in said
    assert_same(dict(warm["policy"]), dict(load_checkpoint(Path("mine.pt"), policy_only=True)["algo"]["policy"]))
    assert_same(warm["critics"], fresh["critics"])
    assert_same(warm["targets"], fresh["critics"])


def test_config_beside_the_parent_of_a_policy_file_is_not_its_own(tmp_path: Path) -> None:
    other = train("td3", "other")
    (tmp_path / "policies").mkdir()
    state = load_checkpoint(train("ppo", "mine").folder.best, policy_only=True)
    save_checkpoint(Path("policies/mine.pt"), {name: value for name, value in state.items() if name != "settings"})
    shutil.copy(other.path / "config.yaml", "config.yaml")
    assert initial_state("ppo", "warm", init_from="policies/mine.pt")["step"] == 0


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("ppo", {"net_arch": (9,)}, "was trained with `net_arch` (8,), not (9,); use the same, or start from another"),
        ("ppo", {"activation": "relu"}, "was trained with `activation` 'tanh', not 'relu'"),
        ("dqn", {}, "was trained with `algo` 'ppo', not 'dqn'"),
        ("ppo", {"env": "Acrobot-v1"}, "Acrobot-v1 does not have the spaces that runs/other/"),
        ("ppo", {"init_from": "runs/nothing"}, "runs/nothing is not a run folder"),
        ("ppo", {"init_from": "nothing.pt"}, "There is no checkpoint nothing.pt"),
        ("ppo", {"init_from": "mine.pt", "net_arch": (9,)}, "The networks in mine.pt have other layers (policy); use"),
    ],
)
def test_other_networks_and_spaces_are_refused_before_a_folder_is_created(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    other = train("ppo", "other")
    state = load_checkpoint(other.folder.best, policy_only=True)
    save_checkpoint(Path("mine.pt"), {name: value for name, value in state.items() if name != "settings"})
    env, own = ALGORITHMS[kind]
    given = {"env": env, "run_name": "a", "init_from": "runs/other", **SMALL, **own, **settings}
    with pytest.raises(unidle.UsageError) as error:
        unidle.train(**given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("runs/a").exists()


def test_code_named_by_a_foreign_run_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = train("ppo", "other")
    path = other.path / "config.yaml"
    path.write_text(path.read_text().replace("env: CartPole-v1", "env: evil_module:Env"))
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert initial_state("ppo", "warm", init_from="runs/other")["step"] == 0


def test_init_from_cannot_change_on_resume() -> None:
    train("ppo", "other")
    train("ppo", "a")
    with pytest.raises(unidle.UsageError, match="A resumed run keeps its recipe, but init_from would change it"):
        unidle.resume("runs/a", init_from="runs/other", quiet=True)
