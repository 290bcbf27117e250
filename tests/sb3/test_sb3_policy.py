"""`model.policy`: Stable-Baselines3's policy with the model's weights, in both directions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_envs import Choice
from gymnasium import spaces
from torch import nn
from toy_envs import Walk

from unidle.errors import UsageError
from unidle.sb3 import DQN, PPO, SAC, TD3, make_vec_env

theirs = pytest.importorskip("stable_baselines3")

SMALL: dict[str, Any] = {"seed": 3, "device": "cpu", "policy_kwargs": {"net_arch": [8, 4]}}
ON: dict[str, Any] = {**SMALL, "n_steps": 16, "batch_size": 16, "n_epochs": 2}
OFF: dict[str, Any] = {**SMALL, "learning_starts": 8, "buffer_size": 64, "batch_size": 4}


class Reach(Choice):
    """Continuous actions, in a range that is no power of two."""

    action_space = spaces.Box(np.float32([-3, 0]), np.float32([3, 10]))

    def step(self, action: Any) -> Any:
        return super().step(int(action[0] > 0))


CASES: dict[str, Any] = {
    "ppo": lambda: PPO("MlpPolicy", Choice(), **ON),
    "ppo, real actions": lambda: PPO("MlpPolicy", Reach(), **ON),
    "ppo, gsde": lambda: PPO("MlpPolicy", Reach(), use_sde=True, **ON),
    "sac": lambda: SAC("MlpPolicy", Reach(), **OFF),
    "sac, gsde": lambda: SAC("MlpPolicy", Reach(), use_sde=True, **OFF),
    "sac, 3 critics": lambda: SAC("MlpPolicy", Reach(), **{**OFF, "policy_kwargs": {"n_critics": 3}}),
    "td3": lambda: TD3("MlpPolicy", Reach(), **OFF),
    "dqn": lambda: DQN("MlpPolicy", Choice(), **OFF),
}
cases = pytest.mark.parametrize("create", CASES.values(), ids=CASES)


def observations(model: Any, count: int = 32) -> np.ndarray:
    shape = count, *model.observation_space.shape
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@cases
def test_policy_is_that_of_stable_baselines3_and_acts_as_the_model(create: Any) -> None:
    model = create().learn(32)
    assert type(model.policy) is getattr(theirs, model.algo.upper()).policy_aliases["MlpPolicy"]
    seen = observations(model)
    expected, _ = model.predict(seen, deterministic=True)
    assert model.policy.predict(seen, deterministic=True)[0] == pytest.approx(expected, abs=1e-5)
    assert model.get_parameters()["policy"].keys() == model.policy.state_dict().keys()


@cases
def test_weights_that_the_script_changes_act_and_are_learned_from(create: Any, tmp_path: Path) -> None:
    model = create()
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in model.policy.state_dict().items()
    }
    model.policy.load_state_dict(changed)
    seen = observations(model)
    expected, _ = model.policy.predict(seen, deterministic=True)
    assert model.predict(seen, deterministic=True)[0] == pytest.approx(expected, abs=1e-4)
    for name, value in model.get_parameters()["policy"].items():
        assert torch.allclose(value, model.policy.state_dict()[name], atol=1e-6), name
    model.save(tmp_path / "model")
    loaded = type(model).load(tmp_path / "model")
    assert loaded.predict(seen, deterministic=True)[0] == pytest.approx(expected, abs=1e-4)
    model.learn(4)
    head = next(name for name in changed if "log_std" not in name)
    assert 0 <= (model.policy.state_dict()[head] - changed[head]).abs().max() < 0.1


def test_policy_that_a_script_keeps_has_what_was_learned() -> None:
    model = PPO("MlpPolicy", Choice(), **ON)
    policy = model.policy
    before = copy.deepcopy(policy.state_dict())
    model.learn(32)
    assert policy is model.policy
    assert not torch.equal(policy.state_dict()["action_net.weight"], before["action_net.weight"])
    assert_acts_alike(model)


def assert_acts_alike(model: Any) -> None:
    seen = observations(model)
    expected, _ = model.predict(seen, deterministic=True)
    assert np.array_equal(model.policy.predict(seen, deterministic=True)[0], expected)


def test_policy_in_a_callback_is_that_of_the_iteration() -> None:
    model = PPO("MlpPolicy", Choice(), **ON)
    weights: list[torch.Tensor] = []

    def keep(locals_: Any, _: Any) -> None:
        weights.append(model.policy.state_dict()["action_net.weight"].clone())

    model.learn(32, callback=keep)
    assert torch.equal(weights[0], weights[15])  # steps of one iteration
    assert not torch.equal(weights[15], weights[16])
    assert torch.equal(weights[31], model.policy.state_dict()["action_net.weight"])


def test_reading_the_policy_does_not_change_training() -> None:
    plain, read = PPO("MlpPolicy", Walk(), **ON), PPO("MlpPolicy", Walk(), **ON)
    assert read.policy is not None
    left, right = (model.learn(64).get_parameters()["policy"] for model in (plain, read))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_policy_learns_by_imitation_before_reinforcement() -> None:
    model = PPO("MlpPolicy", Choice(), **ON)
    seen = torch.as_tensor(observations(model))
    wanted = torch.ones(len(seen), dtype=torch.long)
    optimiser = torch.optim.Adam(model.policy.parameters(), 0.05)
    for _ in range(100):
        _, log_prob, _ = model.policy.evaluate_actions(seen, wanted)
        optimiser.zero_grad()
        (-log_prob.mean()).backward()
        optimiser.step()
    assert (model.predict(seen.numpy(), deterministic=True)[0] == 1).mean() > 0.9


def test_values_and_log_probabilities_can_be_computed() -> None:
    model = PPO("MlpPolicy", Reach(), **ON).learn(16)
    observation, _ = model.policy.obs_to_tensor(observations(model))
    actions = torch.zeros(len(observation), 2)
    values, log_prob, entropy = model.policy.evaluate_actions(observation, actions)
    assert values.shape == (32, 1)
    assert log_prob.shape == entropy.shape == (32,)


@pytest.mark.parametrize(
    ("create", "names"),
    [
        ("sac", ("actor", "critic", "critic_target")),
        ("td3", ("actor", "actor_target", "critic", "critic_target")),
        ("dqn", ("q_net", "q_net_target")),
    ],
)
def test_networks_are_attributes_of_the_model(create: str, names: tuple[str, ...]) -> None:
    model = CASES[create]()
    for name in names:
        assert getattr(model, name) is getattr(model.policy, name)


def test_compiled_policy_may_be_assigned_but_no_other() -> None:
    model = PPO("MlpPolicy", Choice(), **ON)
    model.policy = torch.compile(model.policy)
    assert_acts_alike(model)
    with pytest.raises(UsageError, match="The policy cannot be replaced"):
        model.policy = nn.Linear(2, 2)


def test_policy_that_stable_baselines3_does_not_have_is_refused_but_has_parameters() -> None:
    model = PPO("MlpPolicy", make_vec_env(Choice, 2), **ON, settings={"normalize_obs": True})
    with pytest.raises(UsageError, match="has no policy with these networks"):
        _ = model.policy
    given = model.get_parameters()
    assert "encoder.norm.mean" in given["policy"]
    model.set_parameters(given)


class Picture(Choice):
    """An image with channels last."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        _, info = super().reset(seed=seed)
        return np.full((36, 36, 1), 200, np.uint8), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return (np.full((36, 36, 1), 100, np.uint8), *rest)


class ChannelsFirst(nn.Module):
    """A CNN as in Stable-Baselines3's documentation: it expects channels first."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 5) -> None:
        super().__init__()
        self.features_dim = features_dim
        self.conv = nn.Conv2d(observation_space.shape[0], 2, 8, 4)
        self.linear = nn.Linear(2 * 8 * 8, features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        assert observations.shape[1:] == (1, 36, 36)
        assert observations.max() <= 1
        return self.linear(self.conv(observations).flatten(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"features_extractor_kwargs": {"features_dim": 7}},
        {"features_extractor_class": ChannelsFirst, "features_extractor_kwargs": {"features_dim": 7}},
    ],
    ids=["default", "other size", "own"],
)
def test_images_are_read_as_in_stable_baselines3(options: dict[str, Any], tmp_path: Path) -> None:
    model = PPO("CnnPolicy", Picture(), **{**ON, "policy_kwargs": options}).learn(16)
    width = 7 if options else 512
    assert model.get_parameters()["policy"]["action_net.weight"].shape == (2, width)
    seen = np.random.default_rng(0).integers(0, 256, (16, 36, 36, 1), np.uint8)
    expected, _ = model.predict(seen, deterministic=True)
    assert np.array_equal(model.policy.predict(seen, deterministic=True)[0], expected)
    model.save(tmp_path / "model")
    own = {"policy_kwargs": options} if "features_extractor_class" in options else {}
    loaded = PPO.load(tmp_path / "model", **own)
    assert np.array_equal(loaded.predict(seen, deterministic=True)[0], expected)


# -- parameters --------------------------------------------------------------------------------------------------------


@cases
def test_parameters_set_again_are_the_same_bits(create: Any) -> None:
    model = create().learn(16)
    before = copy.deepcopy(model._state()["algo"]["policy"])
    model.set_parameters(model.get_parameters())
    after = model._state()["algo"]["policy"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unknown_and_missing_parameters_are_value_errors_and_missing_weights_runtime_errors() -> None:
    model = PPO("MlpPolicy", Choice(), **ON)
    given = model.get_parameters()
    with pytest.raises(ValueError, match="pass those that get_parameters returns"):
        model.set_parameters({**given, "other": {}}, exact_match=False)
    with pytest.raises(ValueError, match="pass those that get_parameters returns"):
        model.set_parameters({"policy": given["policy"]})
    weights = dict(given["policy"])
    weights.pop("value_net.bias")
    with pytest.raises(RuntimeError, match=r"lacks value_net\.bias"):
        model.set_parameters({**given, "policy": weights})
    model.set_parameters({"policy": {"value_net.bias": torch.tensor([5.0])}}, exact_match=False)
    assert model.get_parameters()["policy"]["value_net.bias"].item() == 5.0


def test_zip_of_stable_baselines3_with_gsde_acts_as_there(tmp_path: Path) -> None:
    before = theirs.SAC("MlpPolicy", Reach(), use_sde=True, policy_kwargs={"net_arch": [8]}, device="cpu")
    before.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="train_freq"):
        after = SAC.load(tmp_path / "model", env=Reach(), policy_kwargs={"net_arch": [8]})
    seen = observations(after)
    expected, _ = before.predict(seen, deterministic=True)
    assert after.predict(seen, deterministic=True)[0] == pytest.approx(expected, abs=1e-5)
