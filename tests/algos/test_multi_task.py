"""SAC on several tasks: heads, temperatures and memory of their own; and whose turn it is."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from multitask_sac import TASKS, algo_of, some_rows

from unidle.config import Config, SACRecipe
from unidle.config.validate import validated
from unidle.engine.build import make_envs
from unidle.envs.make import EnvMaker
from unidle.envs.spec import probe
from unidle.errors import UsageError
from unidle.nn.sac_policy import SACPolicy, outputs_of_task
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def test_outputs_are_those_of_the_task_that_the_last_features_tell() -> None:
    features = torch.eye(4)[[2, 0, 1]][:, -3:]  # tasks 1, 0 (none is told), 0
    values = torch.arange(3 * 6.0).view(3, 6)
    assert outputs_of_task(values, features, 3).tolist() == [[2.0, 3.0], [6.0, 7.0], [12.0, 13.0]]
    both = torch.stack((values, -values))  # of an ensemble
    assert torch.equal(
        outputs_of_task(both, features, 3),
        torch.stack((values, -values)).unflatten(2, (3, 2))[:, torch.arange(3), torch.tensor([1, 0, 0])],
    )
    assert outputs_of_task(values, features, 1) is values


def test_an_update_for_one_task_leaves_the_heads_of_the_others_alone() -> None:
    algo = algo_of()
    obs = some_rows()[[0, 3]]  # both of task 0
    params, _ = algo.policy.act(obs)
    loss = params.mean.sum() + algo.rule.critics(obs, torch.zeros(2, 2)).sum()
    head = algo.policy.actor_head.weight
    of_actor, of_critics = torch.autograd.grad(loss, (head, algo.rule.critics.ensemble.weights[-1]))
    touched = of_actor.view(TASKS, -1).abs().sum(1) > 0
    assert touched.tolist() == [True, False, False]
    assert (of_critics.abs().sum((0, 1)) > 0).tolist() == [True, False, False]


def test_each_task_has_a_temperature_that_follows_its_own_entropy() -> None:
    algo = algo_of(learning_rate=0.01)
    entropies = torch.tensor([5.0, -5.0, 5.0])
    algo.rule.target_entropy = 0.0
    sampled = algo.policy.distribution.sampled_with_log_prob

    def told(params: Any, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions, log_prob = sampled(params, noise)
        return actions, log_prob * 0 - entropies.repeat_interleave(len(log_prob) // TASKS)

    algo.policy.distribution.sampled_with_log_prob = told  # type: ignore[method-assign]
    algo.update(torch.Generator().manual_seed(1))
    # Adam's first step is the learning rate, against the gradient's sign: too much entropy cools, too little heats.
    assert algo.rule.log_alpha.tolist() == pytest.approx([-0.01, 0.01, -0.01], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"per": True}, "supports neither prioritised replay nor n-step returns; remove `per`"),
    ],
)
def test_what_several_tasks_do_not_go_with_is_refused(changes: dict[str, Any], sentence: str) -> None:
    settings = {"algo": "sac", "n_tasks": 3, "batch_size": 30, "n_steps": 1, "env": "Pendulum-v1", **changes}
    with pytest.raises(UsageError, match=sentence):
        validated(Config().with_values(settings, "test"))


def test_a_batch_that_is_no_multiple_of_the_tasks_is_learned_from_too() -> None:
    settings = {"algo": "sac", "n_tasks": 3, "batch_size": 31, "n_steps": 1, "env": "Pendulum-v1"}
    assert validated(Config().with_values(settings, "test")).recipe.batch_size == 31
    algo = algo_of(batch_size=31)
    before = algo.rule.log_alpha.clone()
    algo.update(torch.Generator().manual_seed(1))
    assert (algo.rule.log_alpha != before).all()


def test_an_observation_that_cannot_tell_the_task_is_refused() -> None:
    actions, recipe = ActionLayout.of(spaces.Box(-1, 1, (2,))), SACRecipe(n_tasks=5, batch_size=30)
    with pytest.raises(UsageError, match="`n_tasks` 5 needs observations that are one float32 vector"):
        SACPolicy(ObservationLayout.of(spaces.Box(-9, 9, (5,))), actions, recipe)


class Turns(gymnasium.Env):
    """Shows which slot of how many it is, and in which episode; each lasts a step."""

    takes_turns = True
    observation_space = spaces.Box(-1, 2**24, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, n_slots: int = 1) -> None:
        self._n_slots = n_slots

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        told = options or {"env": -1, "episode": -1}
        self._shown = np.array([told["env"], told["episode"], self._n_slots], np.float32)
        return self._shown, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._shown, 0.0, True, False, {}


def test_environments_that_take_turns_are_told_which_of_how_many_they_are_and_in_which_episode() -> None:
    maker = EnvMaker("turns", Turns, kind="gymnasium")
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
