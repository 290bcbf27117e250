"""Models that Stable-Baselines3 saved act as before, and nothing pickled in their files runs."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from identity_envs import ActionIdentityEnv, ObservationIdentityEnv
from toy_envs import Walk

import unidle.sb3 as ours
from unidle.errors import UsageError

theirs = pytest.importorskip("stable_baselines3")

BOX = spaces.Box(np.array([-2.0, -1.0], np.float32), np.array([2.0, 3.0], np.float32))
SMALL: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 32, "batch_size": 16},
    "SAC": {"learning_starts": 16, "batch_size": 8, "buffer_size": 100},
    "TD3": {"learning_starts": 16, "batch_size": 8, "buffer_size": 100},
    "DQN": {"learning_starts": 16, "batch_size": 8, "buffer_size": 100},
}


class Numbered(Walk):
    action_space = spaces.Discrete(3)


def box_env() -> ActionIdentityEnv:
    return ActionIdentityEnv(BOX)


def image_env() -> ObservationIdentityEnv:
    return ObservationIdentityEnv(spaces.Box(0, 255, (3, 36, 40), np.uint8))


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Trains a model of Stable-Baselines3 for a moment, and saves it."""

    def save(name: str, env: Any, policy: str = "MlpPolicy", **kwargs: Any) -> tuple[Any, Path]:
        model = getattr(theirs, name)(policy, env, device="cpu", seed=1, **{**SMALL[name], **kwargs}).learn(40)
        path = tmp_path / f"{name}.zip"
        model.save(path)
        return model, path

    return save


@pytest.mark.parametrize(
    ("name", "env", "kwargs"),
    [
        ("PPO", box_env, {}),
        ("PPO", Numbered, {"policy_kwargs": {"net_arch": {"pi": [16], "vf": [8, 8]}, "activation_fn": torch.nn.ReLU}}),
        ("SAC", box_env, {"policy_kwargs": {"net_arch": [16, 16]}}),
        ("TD3", box_env, {"policy_kwargs": {"net_arch": [16, 16]}}),
        ("DQN", Numbered, {}),
    ],
)
def test_model_acts_as_in_stable_baselines3(name: str, env: Any, kwargs: dict[str, Any], saved: Any) -> None:
    before, path = saved(name, env(), **kwargs)
    given = {} if name == "PPO" else {"train_freq": 1}
    after = getattr(ours, name).load(path, env=env(), **given)
    observations = np.random.default_rng(0).normal(size=(64, *before.observation_space.shape)).astype(np.float32)
    expected = before.predict(observations, deterministic=True)[0]
    np.testing.assert_allclose(after.predict(observations, deterministic=True)[0], expected, atol=1e-5)
    after.learn(32)


def test_exploration_is_taken_over_in_units_of_our_actions(saved: Any) -> None:
    before, path = saved("PPO", box_env())
    after = ours.PPO.load(path, env=box_env())
    observation = np.zeros((20_000, *before.observation_space.shape), np.float32)
    spread = after.agent.policy.log_std.detach().exp() * torch.tensor([2.0, 2.0])
    assert torch.allclose(spread, before.policy.log_std.detach().exp(), atol=1e-6)
    assert after.predict(observation)[0].std(0) == pytest.approx(before.predict(observation)[0].std(0), rel=0.05)


def test_critics_and_temperature_are_taken_over(saved: Any) -> None:
    before, path = saved("SAC", box_env(), policy_kwargs={"net_arch": [16, 16]})
    after = ours.SAC.load(path, env=box_env(), train_freq=1)
    assert torch.equal(after.log_ent_coef, before.log_ent_coef.detach())
    taken = after._state()["algo"]
    weights = before.critic.qf1[2].weight.detach().T
    assert torch.equal(taken["critics"]["ensemble.weights.1"][1], weights)
    assert torch.equal(taken["targets"]["ensemble.biases.2"][0, 0], before.critic_target.qf0[4].bias.detach())


def test_image_policy_acts_as_in_stable_baselines3(saved: Any) -> None:
    before, path = saved("PPO", image_env(), "CnnPolicy", n_steps=16)
    after = ours.PPO.load(path, env=image_env())
    observations = np.random.default_rng(0).integers(0, 256, (16, 3, 36, 40), np.uint8)
    with torch.no_grad():
        expected = before.policy.get_distribution(torch.as_tensor(observations)).distribution.logits
        logits = after.agent.policy.act(torch.as_tensor(observations).flatten(1))[0].logits
    assert torch.allclose(logits.log_softmax(-1), expected, atol=1e-4)


def test_arguments_are_taken_over_unless_given_again(saved: Any) -> None:
    _, path = saved("PPO", box_env(), gamma=0.9, ent_coef=0.02, learning_rate=lambda _: 1e-3, clip_range=0.1)
    with pytest.warns(UserWarning, match="`learning_rate` of the saved model is a Python object"):
        found: Any = ours.PPO.load(path, env=box_env(), ent_coef=0.5).config.recipe
    assert (found.gamma, found.ent_coef, found.learning_rate, found.n_steps) == (0.9, 0.5, 3e-4, 32)
    assert found.clip_range == 0.1


def test_custom_objects_for_playing_leave_saved_values_and_defaults(saved: Any) -> None:
    _, path = saved("PPO", box_env(), learning_rate=lambda _: 1e-3, clip_range=0.1)
    idiom = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    with pytest.warns(UserWarning, match="in custom_objects is 0.0, but must be above 0") as caught:
        model = ours.PPO.load(path, env=box_env(), custom_objects=idiom)
    assert len(caught) == 2
    assert (model.learning_rate, model.clip_range) == (3e-4, 0.1)


def test_what_is_pickled_in_the_file_does_not_run(saved: Any, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    _, path = saved("PPO", box_env())
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(tmp_path / "trap.zip", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name == "data":
                data = json.loads(content)
                trap = {":type:": "<class 'dict'>", ":serialized:": base64.b64encode(pickle.dumps(Trap())).decode()}
                content = json.dumps(
                    {key: {**trap} if isinstance(value, dict) else value for key, value in data.items()}
                )
            bad.writestr(name, content)
    ours.PPO.load(tmp_path / "trap.zip", env=box_env(), clip_range=0.2)
    assert not (tmp_path / "sprung").exists()


def test_model_that_does_not_fit_is_refused(saved: Any) -> None:
    _, path = saved("PPO", box_env())
    with pytest.raises(UsageError, match="pass its environment"):
        ours.PPO.load(path)
    with pytest.raises(UsageError, match="other layers"):
        ours.PPO.load(path, env=box_env(), policy_kwargs={"net_arch": [8, 8]})
    with pytest.raises(UsageError, match="it has another network"):
        ours.PPO.load(path, env=box_env(), policy_kwargs={"net_arch": [64, 64, 64]})
