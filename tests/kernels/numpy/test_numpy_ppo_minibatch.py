"""PPO's minibatches in NumPy against autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from ppo_minibatches import (
    ACTIONS,
    BATCH,
    LEARNING,
    RECIPES,
    SAMPLES,
    a_batch,
    after_six_steps,
    assert_close,
    gradient_by,
    ops_of,
)
from ppo_minibatches import an_algo as an_algo_on

from unidle.algos.ppo import PPO
from unidle.kernels.numpy.ppo_minibatch import NumpyMinibatch
from unidle.nn.numpy_views import numpy_actor_critic
from unidle.spaces.actions import ActionLayout

an_algo = partial(an_algo_on, device=torch.device("cpu"))
NETWORKS: dict[str, dict[str, Any]] = {
    "one layer": {"net_arch": (24,)},
    "three layers": {"net_arch": (24, 40, 8), "activation": "relu"},
    "a trunk for both": {"share_trunk": True, "ent_coef": 0.1, "activation": "relu"},
    "products too large for one thread": {"net_arch": (64, 64)},
}


def in_numpy(algo: PPO) -> NumpyMinibatch:
    network = numpy_actor_critic(algo.policy, algo.parameters)
    grad, step = algo.parameters.grad, algo.adam.step
    return NumpyMinibatch(network, grad, algo.counters, algo.coefficients, algo.clip_range, step)


def assert_same_gradient(name: str, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False) -> None:
    algo = an_algo(ACTIONS[name], changes, masked=masked)
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS[name]), weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES)[:BATCH]
    found = [gradient_by(algo, compute, batch, order) for compute in (ops_of(algo).gradient, in_numpy(algo).gradient)]
    assert_close(found)
    assert torch.equal(found[0][0] == 7.0, found[1][0] == 7.0)  # nothing is written beside the parameters


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["fresh", "stale"])
def test_the_gradient_is_that_of_autograd_for_every_kind_of_action(name: str, weighted: bool) -> None:
    assert_same_gradient(name, {"ent_coef": 0.02}, weighted=weighted)


@pytest.mark.parametrize("name", ["one choice", "heads", "both"])
def test_what_a_mask_forbids_has_no_part_in_the_gradient(name: str) -> None:
    assert_same_gradient(name, {"ent_coef": 0.02}, masked=True)


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_is_that_of_autograd_for_every_recipe(name: str) -> None:
    assert_same_gradient("both", RECIPES[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_that_of_autograd_for_every_network(name: str) -> None:
    assert_same_gradient("both", NETWORKS[name])


@pytest.mark.parametrize("name", ["one choice", "both"])
def test_one_sample_is_enough_if_advantages_stay_as_they_are(name: str) -> None:
    algo = an_algo(ACTIONS[name], {"normalize_advantage": False})
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS[name]), weighted=True, masked=False)
    order = torch.tensor([5])
    ways = (ops_of(algo).gradient, in_numpy(algo).gradient)
    assert_close([gradient_by(algo, compute, batch, order) for compute in ways])


@pytest.mark.parametrize("name", LEARNING)
def test_steps_clip_count_and_stop_as_the_plain_ones(name: str) -> None:
    ways = (lambda algo: ops_of(algo).reference_learn, lambda algo: in_numpy(algo).learn)
    plain, ours = (after_six_steps(an_algo(ACTIONS["both"], LEARNING[name]), way) for way in ways)
    assert bool(plain[-1]) == ("target_kl" in LEARNING[name])
    assert 0 < float(plain[-2]) <= 6
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("what", ["log_probs", "returns"])
def test_what_is_not_a_number_is_seen_in_all_that_it_is_part_of(what: str) -> None:
    algo = an_algo(ACTIONS["reals"], {"clip_range_vf": 0.2})
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS["reals"]), weighted=False, masked=False)
    getattr(batch, what)[3] = torch.nan
    order = torch.arange(BATCH)
    (plain, logged), (ours, also_logged) = (
        gradient_by(algo, compute, batch, order) for compute in (ops_of(algo).gradient, in_numpy(algo).gradient)
    )
    assert logged.isnan().any()
    assert torch.equal(logged.isnan(), also_logged.isnan())
    assert torch.equal(plain.isnan(), ours.isnan())


def a_network(seen: spaces.Space, actions: spaces.Space) -> torch.nn.Module:
    return torch.nn.Linear(5, 7)


def test_it_is_used_where_minibatches_are_small_and_the_formulas_are_known() -> None:
    def is_used(algo: PPO) -> bool:
        return ops_of(algo).numpy_unsupported is None

    assert is_used(an_algo(ACTIONS["both"], {}))
    for changes in (
        {"activation": "silu"},
        {"net_arch": (2048, 8)},
        {"net_arch": ()},
        {"recurrent": "gru"},
    ):
        assert not is_used(an_algo(ACTIONS["both"], changes)), changes
    assert not is_used(an_algo(spaces.MultiDiscrete([2] * 9), {}))
    assert not is_used(an_algo(ACTIONS["both"], {}, network=a_network))
