"""Schedules: from the recipe, or given as functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_runs import CPU

from unidle.algos.capturing import no_capture
from unidle.algos.registry import Algorithm, new_algorithm, new_policy
from unidle.algos.schedules import schedules_of
from unidle.config import Recipe
from unidle.config.config import recipe_for
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.kernels.dispatch import no_report


def algorithm(recipe: Recipe) -> Algorithm:
    env_spec = probe(env_maker("CartPole-v1"))
    policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe).to(CPU)
    return new_algorithm(policy, recipe, no_capture, no_report)


def test_linear_schedules_fall_to_0_and_constant_ones_stay() -> None:
    schedules = schedules_of(recipe_for("ppo", learning_rate=1e-3, lr_schedule="linear", clip_range=0.3))
    assert [schedules["learning_rate"](remaining) for remaining in (1.0, 0.25, 0.0)] == [1e-3, 0.25e-3, 0.0]
    assert [schedules["clip_range"](remaining) for remaining in (1.0, 0.25, 0.0)] == [0.3, 0.3, 0.3]
    assert schedules_of(recipe_for("sac")).keys() == {"learning_rate"}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_given_schedule_sets_value_at_each_progress(algo: str) -> None:
    recipe = recipe_for(algo, n_envs=1, n_steps=8)
    if algo == "ppo":
        recipe = dataclasses.replace(recipe, batch_size=8)
    learner = algorithm(recipe)
    learner.schedules["learning_rate"] = lambda remaining: remaining**2
    learner.set_progress(0.5)
    rate = learner.learning_rate if algo == "ppo" else learner.rule.learning_rate  # type: ignore[attr-defined]
    assert torch.equal(rate, torch.tensor([0.25]))
