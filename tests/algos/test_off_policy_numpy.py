"""The choice of NumPy gradients on a CPU, and how they treat masks and values that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_modules import with_change
from multitask_sac import make_multitask_sac
from off_policy_runs import filled_dqn, filled_sac, filled_td3, keep_autograd
from small_envs import Drift
from small_runs import SmallRun
from toy_envs import Masked

from unidle.algos import off_policy_numpy
from unidle.algos.off_policy_numpy import choose_dqn_gradient, choose_sac_gradients, choose_td3_gradients
from unidle.buffers.replay import Transitions
from unidle.kernels.dispatch import Dispatch
from unidle.kernels.numpy.dqn_gradient import DqnGradient

RUNS: dict[str, tuple[Any, Any, Any]] = {
    "sac": (filled_sac, Drift, choose_sac_gradients),
    "td3": (filled_td3, Drift, choose_td3_gradients),
    "dqn": (filled_dqn, "CartPole-v1", choose_dqn_gradient),
}


def sample(run: SmallRun) -> tuple[Transitions, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch = run.algo.experience.sampler.sample(run.algo.recipe.batch_size, generator)
    return batch, torch.randn(run.algo.rule.noise_shape, generator=generator)


def gradients_of(rule: Any) -> list[torch.Tensor]:
    parameters = [rule.parameters, *([rule.critic_parameters] if hasattr(rule, "critic_parameters") else [])]
    return [part.grad for part in parameters]


@pytest.mark.parametrize("algo", RUNS)
def test_gradients_are_computed_in_numpy(algo: str) -> None:
    fill, env, _ = RUNS[algo]
    run = fill(env)
    run.algo.update(torch.Generator().manual_seed(0), len(run.algo.rule.phases) - 1)
    assert not run.algo._dispatch.fallbacks


@pytest.mark.parametrize(
    ("algo", "env", "recipe", "reason"),
    [
        ("sac", "CartPole-v1", {}, "actions are discrete"),
        ("sac", Drift, {"activation": "elu"}, "activation elu: NumPy supports tanh and relu"),
        ("sac", Drift, {"critic_arch": ()}, "the network has no hidden layer"),
        ("td3", Drift, {"net_arch": (2**15,)}, "16 rows of 32768 units: torch is faster"),
        ("dqn", "FrozenLake-v1", {}, "the observation is not one float32 vector"),
    ],
    ids=["discrete SAC", "elu", "linear critics", "wide", "categories"],
)
def test_unsupported_cases_keep_autograd_and_record_why(
    algo: str, env: Any, recipe: dict[str, Any], reason: str
) -> None:
    run = RUNS[algo][0](env, **recipe)
    run.algo.update(torch.Generator().manual_seed(0))
    assert list(run.algo._dispatch.fallbacks.values()) == [reason]


def test_several_tasks_keep_autograd() -> None:
    algo = make_multitask_sac()
    batch = algo.experience.sampler.sample(30, torch.Generator().manual_seed(0))
    dispatch = Dispatch()
    choose_sac_gradients(dispatch, algo.rule, batch, torch.randn(algo.rule.noise_shape))
    assert dispatch.fallbacks == {"The SAC update": "there are several tasks"}


def test_wrong_gradient_is_not_used_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: DqnGradient, batch: Transitions) -> tuple[torch.Tensor, torch.Tensor]:
        means, each = compute(self, batch)
        return means, 1.01 * each

    compute = DqnGradient.__call__
    monkeypatch.setattr(DqnGradient, "__call__", wrong)
    reports: list[str] = []
    run = filled_dqn("CartPole-v1")
    run.algo._dispatch = Dispatch(lambda operation, error, instead: reports.append(f"{operation}: {error}"))
    expected = [filled_dqn("CartPole-v1"), run]
    expected[0].algo._choose_gradients = None
    for number in range(3):
        for each in expected:
            each.algo.update(torch.Generator().manual_seed(number))
    assert reports == ["The DQN update: the kernel's TD errors differ from the reference's"]
    assert torch.equal(run.algo.parameters.flat, expected[0].algo.parameters.flat)  # verification changed nothing


MISTAKES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "Huber gradient not clipped": ("dqn", "DqnGradient", {}, "np.clip(error, -1.0, 1.0)", "error"),
    "Huber loss not linear": ("dqn", "DqnGradient", {}, "np.minimum(size, np.float32(1.0))", "size"),
    "weights ignored in DQN": ("dqn", "DqnGradient", {}, "batch.weights.numpy() /", "np.float32(1.0) /"),
    "terminal states valued": ("dqn", "DqnGradient", {}, "batch.discounts.numpy()", "batch.discounts.numpy().max()"),
    "weights ignored in SAC": ("sac", "SacGradients", {}, "q[..., 0], batch.weights.numpy() /", "q[..., 0], 1.0 /"),
    "gradient beyond the value limit": (
        "sac", "SacGradients", {"value_limit": 5.0}, "np.where(q == unlimited, d_q, np.float32(0.0))", "d_q * (q < 9)",
    ),
    "targets not limited": ("sac", "SacGradients", {"value_limit": 5.0}, "np.clip(target, -limit, limit)", "target"),
    "weights ignored in TD3": ("td3", "Td3Gradients", {}, "d_q = batch.weights.numpy() *", "d_q ="),
    "empty transitions count in TD3": ("td3", "Td3Gradients", {}, ".weights.numpy() > 0)", ".weights.numpy() > -1)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_a_first_batch_hides_are_refused(
    mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    algo, name, recipe, old, new = MISTAKES[mistake]
    fill, env, choose = RUNS[algo]
    kernel = getattr(off_policy_numpy, name)
    changed = with_change(kernel.__module__, old, new, tmp_path)
    monkeypatch.setattr(off_policy_numpy, name, getattr(changed, name))
    run = fill(env, **recipe)
    batch, noise = sample(run)
    dispatch, before = Dispatch(), [tensor.clone() for tensor in run.algo.rule.changes]
    first = dataclasses.replace(batch, weights=torch.ones_like(batch.weights))
    choose(dispatch, run.algo.rule, first, noise)
    (reason,) = dispatch.fallbacks.values()
    assert "differ from the reference's" in reason
    assert all(torch.equal(now, then) for now, then in zip(run.algo.rule.changes, before))


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("double_dqn", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("empty", [False, True], ids=["some masked", "empty masks"])
def test_masked_categories_get_no_gradient(double_dqn: bool, dueling: bool, empty: bool) -> None:
    run = filled_dqn(Masked, double_dqn=double_dqn, dueling=dueling)
    rule, (batch, noise) = run.algo.rule, sample(run)
    if empty:  # as in some final observations
        layout = run.algo.policy.obs_layout
        batch.next_obs[::2, layout.mask_offset : layout.mask_offset + layout.mask_width] = 0
    reference = rule.loss_gradient
    choose_dqn_gradient(run.algo._dispatch, rule, batch, noise)
    assert not run.algo._dispatch.fallbacks
    results = []
    for gradient in (rule.loss_gradient, reference):
        means, errors = gradient(batch)
        results.append([means, errors, rule.parameters.grad.clone()])
    assert results[0][0][0] < 100  # the bootstrap is not from log 0
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("algo", RUNS)
@pytest.mark.parametrize("field", ["returns", "obs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_the_gradient_as_in_torch(algo: str, field: str, value: float) -> None:
    fill, env, choose = RUNS[algo]
    run = fill(env)
    rule, (batch, noise) = run.algo.rule, sample(run)
    names = [name for name in ("critic_gradient", "actor_gradient", "loss_gradient") if hasattr(rule, name)]
    references = [getattr(rule, name) for name in names]
    choose(run.algo._dispatch, rule, batch, noise)
    bad = getattr(batch, field).clone()
    (bad.view(torch.float32) if field == "obs" else bad.unsqueeze(1))[3, 0] = value
    batch = dataclasses.replace(batch, **{field: bad})
    arguments = {
        "sac": [(batch, torch.ones(len(batch)), noise[0]), (batch, torch.ones(len(batch)), noise[1])]
        if algo == "sac"
        else [],
        "td3": [(batch, noise), (batch,)],
        "dqn": [(batch,)],
    }[algo]
    for name, reference, given in zip(names, references, arguments):
        finite = []
        for gradient in (getattr(rule, name), reference):
            means, _ = gradient(*given)
            finite.append([bool(means.isfinite().all()), *(grad.isfinite().all() for grad in gradients_of(rule))])
        assert finite[0] == finite[1]


@pytest.mark.parametrize("algo", RUNS)
def test_updates_of_large_networks_follow_those_with_autograd(algo: str) -> None:
    fill, env, _ = RUNS[algo]
    ours, reference = (fill(env, net_arch=(256, 256), batch_size=128) for _ in range(2))
    keep_autograd(reference)
    before = reference.algo.parameters.flat.detach().clone()
    for number in range(2 * len(ours.algo.rule.phases)):
        for run in (ours, reference):
            run.algo.update(torch.Generator().manual_seed(number), number % len(run.algo.rule.phases))
        flat, expected = (run.algo.parameters.flat.detach() for run in (ours, reference))
        changed = float((expected - before).norm())
        assert float((flat - expected).norm()) <= 0.01 * changed  # Adam divides rounding errors by small gradients
    assert changed > 0
    assert not ours.algo._dispatch.fallbacks
