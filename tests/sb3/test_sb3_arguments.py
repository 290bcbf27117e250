"""Constructor arguments of Stable-Baselines3 become unidle's settings; what cannot is refused with the way out."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_envs import Choice
from gymnasium import spaces
from identity_envs import ActionIdentityEnv
from torch import nn

from unidle.errors import UsageError
from unidle.sb3 import DQN, PPO, SAC, TD3, NormalActionNoise

ALL = (PPO, SAC, TD3, DQN)


def recipe(model: Any) -> Any:
    return model.config.recipe


def box_env() -> ActionIdentityEnv:
    return ActionIdentityEnv(spaces.Box(-1, 1, (2,), np.float32))


@pytest.mark.parametrize("ours", ALL, ids=lambda ours: ours.__name__)
def test_arguments_have_the_names_the_order_and_the_defaults_of_stable_baselines3(ours: type) -> None:
    theirs = getattr(pytest.importorskip("stable_baselines3"), ours.__name__)
    expected = [(name, each.default) for name, each in inspect.signature(theirs).parameters.items()]
    found = [(name, each.default) for name, each in inspect.signature(ours).parameters.items()]
    assert found == [*expected, ("settings", None)]


def test_defaults_of_ppo_are_those_of_stable_baselines3() -> None:
    model = PPO("MlpPolicy", Choice())
    found = recipe(model)
    assert (found.n_envs, found.n_steps, found.batch_size, found.n_epochs) == (1, 2048, 64, 10)
    assert (found.net_arch, found.activation, found.adam_eps, found.overlap) == ((64, 64), "tanh", 1e-5, "off")


def test_defaults_of_off_policy_algorithms_are_those_of_stable_baselines3() -> None:
    sac, td3, dqn = (
        recipe(SAC("MlpPolicy", box_env())),
        recipe(TD3("MlpPolicy", box_env())),
        recipe(DQN("MlpPolicy", Choice())),
    )
    assert (sac.n_steps, sac.utd_ratio, sac.learning_starts, sac.net_arch) == (1, 1.0, 100, (256, 256))
    assert (td3.n_steps, td3.net_arch, td3.exploration_noise, td3.learning_rate) == (1, (400, 300), 0.0, 1e-3)
    assert (dqn.n_steps, dqn.utd_ratio, dqn.target_update_interval) == (4, 0.25, 2500)
    assert (dqn.double_dqn, dqn.buffer_size, dqn.exploration_final_eps, dqn.batch_size) == (False, 1_000_000, 0.05, 32)


@pytest.mark.parametrize(
    ("net_arch", "expected"),
    [
        ([32, 16], ((32, 16), None)),
        ((32, 16), ((32, 16), None)),
        ({"pi": [32], "vf": [64, 8]}, ((32,), (64, 8))),
        ([{"pi": [32], "vf": [32]}], ((32,), None)),
        ([], ((), None)),
    ],
)
def test_every_form_of_net_arch_is_understood(net_arch: Any, expected: tuple) -> None:
    found = recipe(PPO("MlpPolicy", Choice(), policy_kwargs={"net_arch": net_arch}))
    assert (found.net_arch, found.critic_arch) == expected


def test_classes_in_policy_kwargs_are_understood() -> None:
    kwargs = {
        "activation_fn": nn.ReLU,
        "ortho_init": False,
        "log_std_init": -1.0,
        "optimizer_class": torch.optim.AdamW,
        "optimizer_kwargs": {"eps": 1e-6, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    }
    found = recipe(PPO("MlpPolicy", box_env(), policy_kwargs=kwargs))
    assert (found.activation, found.ortho_init, found.log_std_init, found.optimizer) == ("relu", False, -1.0, "adamw")
    assert (found.adam_eps, found.weight_decay, found.adam_betas) == (1e-6, 0.1, (0.8, 0.9))


def test_functions_become_schedules_of_the_remaining_training(tmp_path: Path) -> None:
    rates: list[float] = []
    model = PPO(
        "MlpPolicy",
        Choice(),
        learning_rate=lambda remaining: 1e-3 * remaining**2,
        clip_range=lambda remaining: 0.1 + 0.1 * remaining,
        n_steps=32,
        batch_size=32,
        n_epochs=1,
        tensorboard_log=str(tmp_path),
    )
    assert (recipe(model).learning_rate, recipe(model).clip_range) == (1e-3, 0.2)
    seen: list[Any] = []
    model.learn(64, callback=lambda locals_, _: seen.append(model.num_timesteps))
    rates = [record["train/learning_rate"] for record in model_records(model)]
    assert rates == pytest.approx([1e-3, 0.25e-3])
    assert [record["train/clip_range"] for record in model_records(model)] == pytest.approx([0.2, 0.15])
    assert seen == list(range(1, 65))


def model_records(model: Any) -> list[dict[str, Any]]:

    from unidle.metrics.jsonl import read_records

    return [
        record for record in read_records(Path(model.logger.dir) / "metrics.jsonl") if record["kind"] == "iteration"
    ]


def test_action_noise_and_entropy_become_settings() -> None:
    noise = NormalActionNoise(mean=np.zeros(2), sigma=0.2 * np.ones(2))
    assert recipe(TD3("MlpPolicy", box_env(), action_noise=noise)).exploration_noise == 0.2
    model = SAC("MlpPolicy", box_env(), ent_coef="auto_0.1", target_entropy=-3.0, n_steps=3, train_freq=(4, "step"))
    assert (recipe(model).ent_coef, recipe(model).ent_coef_init, recipe(model).target_entropy) == ("auto", 0.1, -3.0)
    assert (recipe(model).n_step, recipe(model).n_steps, recipe(model).utd_ratio) == (3, 4, 0.25)


def test_settings_of_unidle_override_arguments() -> None:
    model = PPO("MlpPolicy", Choice(), settings={"overlap": "strict", "gamma": 0.9})
    assert (recipe(model).overlap, recipe(model).gamma) == ("strict", 0.9)


class Extractor(nn.Module):
    """As a features extractor of Stable-Baselines3: floats, images from 0 to 1."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(observation_space.shape)), features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        assert observations.dtype == torch.float32
        assert observations.max() <= 1
        return self.linear(observations.flatten(1))


class Picture(Choice):
    observation_space = spaces.Box(0, 255, (6, 6, 1), np.uint8)

    def _look(self, observation: Any) -> np.ndarray:
        return np.full((6, 6, 1), 255, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return self._look(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return self._look(observation), *rest


def test_features_extractor_gets_scaled_images_and_trains() -> None:
    kwargs = {"features_extractor_class": Extractor, "features_extractor_kwargs": {"features_dim": 7}}
    model = PPO("CnnPolicy", Picture(), policy_kwargs=kwargs, n_steps=16, batch_size=16, n_epochs=1)
    before = model.get_parameters()["policy"]["features_extractor.linear.weight"]
    assert before.shape == (7, 36)
    model.learn(16)
    assert not torch.equal(before, model.get_parameters()["policy"]["features_extractor.linear.weight"])


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: PPO("MlpPolicy", "NoSuchEnv-v1"), "no environment `NoSuchEnv-v1`"),
        (lambda: PPO("MlpPolicy", object()), "pass an id such as 'CartPole-v1'"),
        (lambda: PPO("FunnyPolicy", Choice()), "the policy FunnyPolicy is not supported; pass 'MlpPolicy'"),
        (lambda: PPO(Extractor, Choice()), "pass 'MlpPolicy'"),  # type: ignore[arg-type]
        (lambda: PPO("MlpPolicy", Choice(), batch_size=100), "does not divide"),
        (lambda: PPO("MlpPolicy", Choice(), learning_rate=lambda _: -1), "a number above 0"),
        (lambda: PPO("MlpPolicy", Choice(), clip_range_vf=lambda left: left), "pass a number"),  # type: ignore[arg-type]
        (lambda: PPO("MlpPolicy", Choice(), rollout_buffer_class=dict), "one rollout buffer"),
        (lambda: PPO("MlpPolicy", Choice(), policy_kwargs={"activation_fn": nn.Softplus}), "unidle has tanh, relu"),
        (lambda: DQN("MlpPolicy", Choice(), replay_buffer_class=dict), "no hindsight replay"),
        (lambda: DQN("MlpPolicy", Choice(), train_freq=(1, "episode")), "write a number of steps"),
        (lambda: SAC("MlpPolicy", box_env(), action_noise=NormalActionNoise(np.zeros(2), np.ones(2))), "needs TD3"),
        (lambda: TD3("MlpPolicy", box_env(), action_noise=NormalActionNoise(np.ones(2), np.ones(2))), "with mean 0"),
        (lambda: PPO("MlpPolicy", Choice(), policy_kwargs={"normalize_images": False}), "normalize_images: False"),
    ],
)
def test_unsupported_argument_is_refused_with_the_way_out(create: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create()


def test_network_with_layers_that_act_otherwise_than_they_learn_is_refused() -> None:
    class Dropping(Extractor):
        def __init__(self, observation_space: spaces.Space, features_dim: int = 4) -> None:
            super().__init__(observation_space, features_dim)
            self.dropout = nn.Dropout(0.5)

    model = PPO("CnnPolicy", Picture(), policy_kwargs={"features_extractor_class": Dropping}, n_steps=16, batch_size=16)
    with pytest.raises(UsageError, match="has a Dropout, which is another function while learning"):
        model.learn(16)


def test_values_that_stand_for_the_default_are_accepted() -> None:
    kwargs = {"net_arch": None, "normalize_images": True}
    found = recipe(PPO("MlpPolicy", Choice(), policy_kwargs=kwargs, clip_range_vf=lambda _: 0.1))  # type: ignore[arg-type]
    assert (found.net_arch, found.clip_range_vf) == ((64, 64), 0.1)


def test_policy_may_be_the_class_that_stable_baselines3_calls_by_that_name() -> None:
    policies = pytest.importorskip("stable_baselines3.ppo")
    assert recipe(PPO(policies.MlpPolicy, Choice())).net_arch == (64, 64)
    assert recipe(PPO(policies.CnnPolicy, Picture())).net_arch == ()


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: PPO("CnnPolicy", "CartPole-v1"), "'CnnPolicy' needs images.* use 'MlpPolicy'"),
        (lambda: PPO("CnnPolicy", Keyed()), "use 'MultiInputPolicy'"),
        (lambda: DQN("MlpPolicy", box_env()), "DQN needs Discrete actions.* use PPO or SAC or TD3"),
        (lambda: TD3("MlpPolicy", Choice()), "TD3 needs Box actions.* use PPO or DQN or SAC"),
    ],
)
def test_spaces_that_do_not_fit_are_refused_when_the_model_is_created(create: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create()


class Keyed(Choice):
    """The observation in a Dict."""

    observation_space = spaces.Dict({"answer": Choice.observation_space})


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: PPO("MlpPolicy", Choice(), batch_size=48, n_steps=64), "`n_envs` of make_vec_env"),
        (lambda: PPO("MlpPolicy", Choice(), n_steps=1, batch_size=1), "or `normalize_advantage=False`"),
        (lambda: PPO("MlpPolicy", "CartPole-v1", settings={"workers": 2, "subproc": False}), '{"subproc": False}'),
    ],
)
def test_messages_name_arguments_instead_of_flags(create: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        create()
    assert "--" not in str(caught.value)
