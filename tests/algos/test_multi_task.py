"""SAC on several tasks: a head, a temperature and a batch share per task, and the reset options of environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from multitask_sac import N_TASKS, make_multitask_sac, random_observations

from unidle.config import Config, SACRecipe
from unidle.config.validate import validated
from unidle.engine.build import make_envs
from unidle.envs.make import EnvMaker
from unidle.envs.probe import probe
from unidle.errors import UsageError
from unidle.nn.sac_policy import SACPolicy, select_task_outputs
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def test_select_task_outputs_follows_one_hot_features() -> None:
    features = torch.eye(4)[[2, 0, 1]][:, -3:]  # tasks 1, 0 (no feature is set), 0
    values = torch.arange(3 * 6.0).view(3, 6)
    assert select_task_outputs(values, features, 3).tolist() == [[2.0, 3.0], [6.0, 7.0], [12.0, 13.0]]
    both = torch.stack((values, -values))  # outputs of an ensemble
    assert torch.equal(
        select_task_outputs(both, features, 3),
        torch.stack((values, -values)).unflatten(2, (3, 2))[:, torch.arange(3), torch.tensor([1, 0, 0])],
    )
    assert select_task_outputs(values, features, 1) is values


def test_gradient_for_one_task_reaches_only_its_head() -> None:
    algo = make_multitask_sac()
    obs = random_observations()[[0, 3]]  # both from task 0
    params, _ = algo.policy.act(obs)
    loss = params.mean.sum() + algo.rule.critics(obs, torch.zeros(2, 2)).sum()
    head = algo.policy.actor_head.weight
    of_actor, of_critics = torch.autograd.grad(loss, (head, algo.rule.critics.ensemble.weights[-1]))
    touched = of_actor.view(N_TASKS, -1).abs().sum(1) > 0
    assert touched.tolist() == [True, False, False]
    assert (of_critics.abs().sum((0, 1)) > 0).tolist() == [True, False, False]


def test_each_task_adapts_its_own_temperature() -> None:
    algo = make_multitask_sac(learning_rate=0.01)
    entropies = torch.tensor([5.0, -5.0, 5.0])
    algo.rule.target_entropy = 0.0
    sampled = algo.policy.distribution.sample_with_log_prob

    def with_fixed_entropy(params: Any, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions, log_prob = sampled(params, noise)
        return actions, log_prob * 0 - entropies.repeat_interleave(len(log_prob) // N_TASKS)

    algo.policy.distribution.sample_with_log_prob = with_fixed_entropy  # type: ignore[method-assign]
    algo.update(torch.Generator().manual_seed(1))
    # Adam's first step is the learning rate. Too much entropy lowers the temperature, too little raises it.
    assert algo.rule.log_alpha[0].tolist() == pytest.approx([-0.01, 0.01, -0.01], abs=1e-6)


@pytest.mark.parametrize("changes", [{"per": True}, {"n_step": 3}], ids=str)
def test_settings_unsupported_with_multiple_tasks_are_rejected(changes: dict[str, Any]) -> None:
    settings = {"algo": "sac", "n_tasks": 3, "batch_size": 30, "n_steps": 1, "env": "Pendulum-v1", **changes}
    message = "supports neither prioritised replay nor n-step returns; remove `per` and `n_step`"
    with pytest.raises(UsageError, match=message):
        validated(Config().with_values(settings, "test"))


def test_batch_size_need_not_be_a_multiple_of_the_tasks() -> None:
    settings = {"algo": "sac", "n_tasks": 3, "batch_size": 31, "n_steps": 1, "env": "Pendulum-v1"}
    assert validated(Config().with_values(settings, "test")).recipe.batch_size == 31
    algo = make_multitask_sac(batch_size=31)
    before = algo.rule.log_alpha.clone()
    algo.update(torch.Generator().manual_seed(1))
    assert (algo.rule.log_alpha != before).all()


def test_observation_without_room_for_the_task_is_rejected() -> None:
    actions, recipe = ActionLayout.of(spaces.Box(-1, 1, (2,))), SACRecipe(n_tasks=5, batch_size=30)
    with pytest.raises(UsageError, match="`n_tasks` 5 needs observations that are one float32 vector"):
        SACPolicy(ObservationLayout.of(spaces.Box(-9, 9, (5,))), actions, recipe)


class ShowsEnvIndex(gymnasium.Env):
    """Shows its env index, its episode and how many environments there are; an episode lasts one step."""

    is_multi_task = True
    observation_space = spaces.Box(-1, 2**24, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, n_envs: int = 1) -> None:
        self._n_envs = n_envs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        given = options or {"env": -1, "episode": -1}
        self._shown = np.array([given["env"], given["episode"], self._n_envs], np.float32)
        return self._shown, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._shown, 0.0, True, False, {}


def test_multi_task_environments_get_env_index_and_episode() -> None:
    maker = EnvMaker("shows_env_index", ShowsEnvIndex, kind="gymnasium")
    envs = make_envs(maker, probe(maker), 3, 7, 0, Config().engine)
    try:
        envs.start(np.zeros(3, np.int64))
        for episode in range(3):
            assert envs.block.obs.view(np.float32)[:, :3].tolist() == [[i, episode, 3] for i in range(3)]
            slices = list(range(len(envs.bounds)))
            envs.send(slices)
            envs.recv(len(slices))
    finally:
        envs.close()
