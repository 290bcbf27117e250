"""Plasticity metrics (dormant neurons, feature rank, norms) against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from multitask_sac import make_multitask_sac
from torch import nn

from unidle.algos.dormancy import TOO_DORMANT, dormancy_warning
from unidle.algos.off_policy import OffPolicy
from unidle.algos.plasticity import dormant_ratio, ensemble_plasticity, feature_rank, trunk_plasticity
from unidle.nn.ensemble import Ensemble
from unidle.nn.mlp import mlp
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.rng import keyed_generator


def test_dormant_ratio_counts_neurons_below_a_tenth_of_layer_mean() -> None:
    # Mean magnitudes 1, 1, 0.1 and 1.9, with mean 1 over the layer: the third is exactly at the threshold.
    first = torch.tensor([[1.0, -2.0, 0.2, 1.9], [-1.0, 0.0, 0.0, -1.9]])
    second = torch.tensor([[3.0, 0.3], [3.0, 0.4]])  # 0.35 is more than a tenth of 1.675
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
        ([99.5, 0.5], 1),  # the first has a share of 0.995
        ([98.0, 1.5, 0.5], 2),
        ([1.0, 1e-3, 1e-3], 1),
        ([1.0, 1.0, 1e-1, 1e-5], 3),
    ],
)
def test_feature_rank_matches_known_singular_values(obs: int, width: int, values: list[float], rank: int) -> None:
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(obs, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(width, len(values), dtype=torch.float64))
    assert feature_rank(left * torch.tensor(values) @ right.T).item() == rank


def test_feature_rank_subsamples_the_whole_batch() -> None:
    features = torch.zeros(1280, 10)
    features[torch.arange(1280), torch.arange(1280) // 128] = 1.0  # one direction per task; tasks come in order
    assert feature_rank(features).item() == 10
    assert feature_rank(torch.zeros(64, 8)).item() == 1


def test_ensemble_member_and_equal_trunk_have_same_metrics() -> None:
    torch.manual_seed(0)
    ensemble, trunk = Ensemble(2, 6, (32, 24), 3, "relu"), mlp(6, (32, 24), "relu", orthogonal_init=False)
    flat, trunk_flat = FlatParameters(ensemble), FlatParameters(trunk)
    linears = [module for module in trunk if isinstance(module, nn.Linear)]
    flat.grad.copy_(torch.randn_like(flat.grad))
    with torch.no_grad():
        ensemble.biases[0][0] -= 0.6  # so that some neurons are dormant
        for linear, weight, bias in zip(linears, ensemble.weights, ensemble.biases):
            linear.weight.copy_(weight[0].T)
            linear.bias.copy_(bias[0, 0])
            trunk_flat.grad_of(linear.weight).copy_(flat.grad_of(weight)[0].T)
    inputs = torch.randn(256, 6)
    of_member, of_mlp = (
        ensemble_plasticity(ensemble, inputs, flat, math.inf),
        trunk_plasticity(trunk, inputs, trunk_flat, math.inf),
    )
    assert 0 < of_member["dormant"] < 1
    assert 1 < of_member["rank"] < 24
    assert of_mlp.keys() < of_member.keys()  # an ensemble has its head as one more layer
    for name, value in of_mlp.items():
        assert value.item() == pytest.approx(of_member[name].item(), rel=1e-5), name
    with torch.no_grad():
        hidden = [trunk[:2](inputs), trunk(inputs)]
    assert of_member["dormant"].item() == pytest.approx(dormant_ratio(hidden).item())
    assert of_member["weight_norm/1"].item() == pytest.approx(ensemble.weights[1][0].norm().item())
    assert of_member["grad_norm/2"].item() == pytest.approx(flat.grad_of(ensemble.weights[2])[0].norm().item())


def test_grad_norm_is_the_clipped_one_before_and_after_clipping() -> None:
    ensemble = Ensemble(1, 4, (8,), 1, "relu")
    flat = FlatParameters(ensemble)
    flat.grad.copy_(torch.randn_like(flat.grad))
    unclipped = ensemble_plasticity(ensemble, torch.randn(9, 4), flat, math.inf)["grad_norm/0"]
    scale = 0.5 / flat.grad.norm()
    before = ensemble_plasticity(ensemble, torch.randn(9, 4), flat, 0.5)["grad_norm/0"]
    flat.clip_(torch.tensor([0.5]))
    after = ensemble_plasticity(ensemble, torch.randn(9, 4), flat, 0.5)["grad_norm/0"]
    assert before.item() == pytest.approx((unclipped * scale).item(), rel=1e-4)
    assert after.item() == pytest.approx(before.item(), rel=1e-4)


def algo_after_updates() -> OffPolicy:
    algo = make_multitask_sac()
    for number in range(3):
        algo.update(keyed_generator(torch.device("cpu"), number))
    algo.experience.updates = 3
    return algo


def test_sac_measures_actor_and_first_critic_without_side_effects() -> None:
    algo = algo_after_updates()
    before, rng_state = (
        {name: value.clone() for name, value in algo.rule.critics.state_dict().items()},
        torch.get_rng_state(),
    )
    first, again, other = algo.plasticity(0, 100), algo.plasticity(0, 100), algo.plasticity(0, 200)
    assert {f"plasticity/{of}/{name}" for of in ("actor", "critic") for name in ("dormant", "rank")} <= first.keys()
    assert {"plasticity/critic/grad_norm/2", "plasticity/actor/weight_norm/1"} <= first.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)  # another batch
    assert first["plasticity/critic/grad_norm/0"] > 0
    assert torch.equal(torch.get_rng_state(), rng_state)
    for name, value in algo.rule.critics.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        algo.rule.critics.ensemble.weights[0][1].zero_()  # the second critic is not measured
        algo.rule.critics.ensemble.biases[0][1].zero_()
    again = algo.plasticity(0, 100)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_plasticity_is_empty_before_first_update() -> None:
    assert make_multitask_sac().plasticity(0, 0) == {}


def test_remedy_names_dormant_share_and_fixes() -> None:
    message = dormancy_warning(TOO_DORMANT + 0.1)
    assert message.startswith("40% of the critic's neurons are dormant")
    assert "more tasks" in message
    assert "smaller" in message
