"""PPO minibatches in NumPy against autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from ppo_minibatches import (
    ACTIONS,
    BATCH,
    RECIPES,
    SAMPLES,
    UPDATE_SETTINGS,
    assert_close,
    compute_gradient,
    make_batch,
    ops_of,
    state_after_six_updates,
)
from ppo_minibatches import make_algo as make_algo_on

from unidle.algos.ppo import PPO
from unidle.kernels.numpy.ppo_minibatch import NumpyMinibatch
from unidle.nn.numpy_views import numpy_actor_critic
from unidle.spaces.actions import ActionLayout

make_algo = partial(make_algo_on, device=torch.device("cpu"))
NETWORKS: dict[str, dict[str, Any]] = {
    "one layer": {"net_arch": (24,)},
    "three layers": {"net_arch": (24, 40, 8), "activation": "relu"},
    "shared trunk": {"share_trunk": True, "ent_coef": 0.1, "activation": "relu"},
    "larger critic": {"net_arch": (16,), "critic_arch": (24, 40)},
    "matrices too large for one thread": {"net_arch": (64, 64)},
}


def numpy_minibatch(algo: PPO) -> NumpyMinibatch:
    network = numpy_actor_critic(algo.policy, algo.parameters)
    grad, step = algo.parameters.grad, algo.optimiser.step
    return NumpyMinibatch(network, grad, algo.counters, algo.coefficients, algo.clip_range, step)


def assert_same_gradient(name: str, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False) -> None:
    algo = make_algo(ACTIONS[name], changes, masked=masked)
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS[name]), weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES)[:BATCH]
    gradients = [
        compute_gradient(algo, compute, batch, order)
        for compute in (ops_of(algo).gradient, numpy_minibatch(algo).gradient)
    ]
    assert_close(gradients)
    assert torch.equal(gradients[0][0] == 7.0, gradients[1][0] == 7.0)  # the padding between parameters is not written


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_gradient_matches_autograd_for_each_action_space(name: str, weighted: bool) -> None:
    assert_same_gradient(name, {"ent_coef": 0.02}, weighted=weighted)


@pytest.mark.parametrize("name", ["binary", "multi-discrete", "mixed"])
def test_gradient_matches_autograd_with_masked_actions(name: str) -> None:
    assert_same_gradient(name, {"ent_coef": 0.02}, masked=True)


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_matches_autograd_for_each_recipe(name: str) -> None:
    assert_same_gradient("mixed", RECIPES[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_matches_autograd_for_each_network(name: str) -> None:
    assert_same_gradient("mixed", NETWORKS[name])


@pytest.mark.parametrize("name", ["binary", "mixed"])
def test_single_sample_gradient_matches_autograd(name: str) -> None:
    algo = make_algo(ACTIONS[name], {"normalize_advantage": False})
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS[name]), weighted=True, masked=False)
    order = torch.tensor([5])
    implementations = (ops_of(algo).gradient, numpy_minibatch(algo).gradient)
    assert_close([compute_gradient(algo, compute, batch, order) for compute in implementations])


@pytest.mark.parametrize("name", UPDATE_SETTINGS)
def test_optimiser_steps_match_reference(name: str) -> None:
    learners = (lambda algo: ops_of(algo).reference_learn, lambda algo: numpy_minibatch(algo).learn)
    plain, ours = (
        state_after_six_updates(make_algo(ACTIONS["mixed"], UPDATE_SETTINGS[name]), learner) for learner in learners
    )
    assert bool(plain[-1]) == ("target_kl" in UPDATE_SETTINGS[name])
    assert 0 < float(plain[-2]) <= 6
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("field", ["log_probs", "returns"])
def test_nan_propagates_as_in_autograd(field: str) -> None:
    algo = make_algo(ACTIONS["box"], {"clip_range_vf": 0.2})
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS["box"]), weighted=False, masked=False)
    getattr(batch, field)[3] = torch.nan
    order = torch.arange(BATCH)
    (plain, logged), (ours, also_logged) = (
        compute_gradient(algo, compute, batch, order)
        for compute in (ops_of(algo).gradient, numpy_minibatch(algo).gradient)
    )
    assert logged.isnan().any()
    assert torch.equal(logged.isnan(), also_logged.isnan())
    assert torch.equal(plain.isnan(), ours.isnan())


def custom_network(observations: spaces.Space, actions: spaces.Space) -> torch.nn.Module:
    return torch.nn.Linear(5, 7)


def test_numpy_is_used_only_for_small_supported_networks() -> None:
    def is_used(algo: PPO) -> bool:
        return ops_of(algo).numpy_unsupported is None

    assert is_used(make_algo(ACTIONS["mixed"], {}))
    for changes in (
        {"activation": "silu"},
        {"net_arch": (2048, 8)},
        {"net_arch": ()},
        {"critic_arch": ()},
        {"critic_arch": (2048, 8)},
        {"recurrent": "gru"},
    ):
        assert not is_used(make_algo(ACTIONS["mixed"], changes)), changes
    assert not is_used(make_algo(spaces.MultiDiscrete([2] * 9), {}))
    assert not is_used(make_algo(ACTIONS["mixed"], {}, network=custom_network))
