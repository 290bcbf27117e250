"""Measures of what a network can still learn, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from multitask_sac import algo_of
from torch import nn

from unidle.algos.dormancy import TOO_DORMANT, remedy
from unidle.algos.off_policy import OffPolicy
from unidle.algos.plasticity import dormant_ratio, feature_rank, of_ensemble, of_trunk
from unidle.nn.ensemble import Ensemble
from unidle.nn.mlp import mlp
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.rng import keyed_generator


def test_a_neuron_is_dormant_at_a_tenth_of_its_layers_mean_and_all_layers_count_together() -> None:
    # Means 1, 1, 0.1 and 1.9, of a layer's mean 1: the third is at the threshold. The signs do not matter.
    first = torch.tensor([[1.0, -2.0, 0.2, 1.9], [-1.0, 0.0, 0.0, -1.9]])
    second = torch.tensor([[3.0, 0.3], [3.0, 0.4]])  # 0.35 of 1.675 is more than a tenth
    assert dormant_ratio([first]).item() == 0.25
    assert dormant_ratio([second]).item() == 0.0
    assert dormant_ratio([first, second]).item() == pytest.approx(1 / 6)
    assert dormant_ratio([torch.zeros(5, 3)]).item() == 1.0


@pytest.mark.parametrize(("obs", "width"), [(40, 12), (12, 40)])
@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ([1.0] * 10, 10),
        ([1.0] * 3, 3),
        ([99.5, 0.5], 1),  # the first is 0.995 of the sum
        ([98.0, 1.5, 0.5], 2),
        ([1.0, 1e-3, 1e-3], 1),
        ([1.0, 1.0, 1e-1, 1e-5], 3),
    ],
)
def test_the_rank_is_that_of_known_singular_values(obs: int, width: int, values: list[float], rank: int) -> None:
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(obs, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(width, len(values), dtype=torch.float64))
    assert feature_rank(left * torch.tensor(values) @ right.T).item() == rank


def test_the_rank_of_many_samples_is_that_of_some_from_all_over_the_batch() -> None:
    features = torch.zeros(1280, 10)
    features[torch.arange(1280), torch.arange(1280) // 128] = 1.0  # a direction for each task, which come in order
    assert feature_rank(features).item() == 10
    assert feature_rank(torch.zeros(64, 8)).item() == 1


def test_a_member_of_an_ensemble_and_a_trunk_of_its_weights_measure_the_same() -> None:
    torch.manual_seed(0)
    ensemble, trunk = Ensemble(2, 6, (32, 24), 3, "relu"), mlp(6, (32, 24), "relu", orthogonally=False)
    flat, of_trunks = FlatParameters(ensemble), FlatParameters(trunk)
    linears = [module for module in trunk if isinstance(module, nn.Linear)]
    flat.grad.copy_(torch.randn_like(flat.grad))
    with torch.no_grad():
        ensemble.biases[0][0] -= 0.6  # so that some are asleep
        for linear, weight, bias in zip(linears, ensemble.weights, ensemble.biases):
            linear.weight.copy_(weight[0].T)
            linear.bias.copy_(bias[0, 0])
            of_trunks.grad_of(linear.weight).copy_(flat.grad_of(weight)[0].T)
    inputs = torch.randn(256, 6)
    member, same = (
        of_ensemble(ensemble, inputs, flat, math.inf),
        of_trunk(trunk, inputs, of_trunks, math.inf),
    )
    assert 0 < member["dormant"] < 1
    assert 1 < member["rank"] < 24
    assert same.keys() < member.keys()  # whose head is a layer too
    for name, value in same.items():
        assert value.item() == pytest.approx(member[name].item(), rel=1e-5), name
    with torch.no_grad():
        hidden = [trunk[:2](inputs), trunk(inputs)]
    assert member["dormant"].item() == pytest.approx(dormant_ratio(hidden).item())
    assert member["weight_norm/1"].item() == pytest.approx(ensemble.weights[1][0].norm().item())
    assert member["grad_norm/2"].item() == pytest.approx(flat.grad_of(ensemble.weights[2])[0].norm().item())


def test_a_gradient_counts_as_clipped_whether_it_was_in_place_or_not() -> None:
    ensemble = Ensemble(1, 4, (8,), 1, "relu")
    flat = FlatParameters(ensemble)
    flat.grad.copy_(torch.randn_like(flat.grad))
    unclipped = of_ensemble(ensemble, torch.randn(9, 4), flat, math.inf)["grad_norm/0"]
    scale = 0.5 / flat.grad.norm()
    before = of_ensemble(ensemble, torch.randn(9, 4), flat, 0.5)["grad_norm/0"]
    flat.clip_(0.5)
    after = of_ensemble(ensemble, torch.randn(9, 4), flat, 0.5)["grad_norm/0"]
    assert before.item() == pytest.approx((unclipped * scale).item(), rel=1e-4)
    assert after.item() == pytest.approx(before.item(), rel=1e-4)


def learned() -> OffPolicy:
    algo = algo_of()
    for number in range(3):
        algo.update(keyed_generator(torch.device("cpu"), number))
    algo.experience.updates = 3
    return algo


def test_sac_measures_actor_and_first_critic_and_changes_nothing() -> None:
    algo = learned()
    before, stream = (
        {name: value.clone() for name, value in algo.rule.critics.state_dict().items()},
        torch.get_rng_state(),
    )
    one, same, other = algo.plasticity(0, 100), algo.plasticity(0, 100), algo.plasticity(0, 200)
    assert {f"plasticity/{of}/{name}" for of in ("actor", "critic") for name in ("dormant", "rank")} <= one.keys()
    assert {"plasticity/critic/grad_norm/2", "plasticity/actor/weight_norm/1"} <= one.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)  # another batch
    assert one["plasticity/critic/grad_norm/0"] > 0
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in algo.rule.critics.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        algo.rule.critics.ensemble.weights[0][1].zero_()  # of the second critic, which is not measured
        algo.rule.critics.ensemble.biases[0][1].zero_()
    again = algo.plasticity(0, 100)
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_before_anything_was_learned_there_is_nothing_to_measure() -> None:
    assert algo_of().plasticity(0, 0) == {}


def test_the_remedy_says_how_much_and_what_to_do() -> None:
    sentence = remedy(TOO_DORMANT + 0.1)
    assert sentence.startswith("40% of the critic's neurons are dormant")
    assert "more tasks" in sentence
    assert "smaller" in sentence
