"""The proof that PPO's kernels compute what the references do: deliberately wrong kernels are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_modules import with_change
from ppo_minibatches import ACTIONS, ops_of

from unidle.algos import ppo_ops, ppo_verification
from unidle.algos.ppo import PPO, Batch
from unidle.algos.ppo_ops import new_ppo
from unidle.algos.ppo_verification import moved_weights, proof_batches
from unidle.algos.run_to_end import run_to_end
from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.kernels import numpy as numpy_kernels
from unidle.kernels.dispatch import Dispatch
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU, DEVICE = torch.device("cpu"), torch.device("cpu" if INTERPRETED else "cuda")
needs_triton = pytest.mark.gpu if not INTERPRETED else lambda test: test
_BOX = ACTIONS["box"]
SETTINGS: dict[str, Any] = {
    "n_envs": 20,
    "n_steps": 15,
    "batch_size": 60,
    "net_arch": (16, 16),
    "clip_range_vf": 0.3,
    "ent_coef": 0.003,
    "target_kl": 0.02,
    "overlap": "strict",
}


def untrained_algo(device: torch.device, **changes: Any) -> PPO:
    """PPO with its initial weights, as when a run begins."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(1)
    actions = ACTIONS["mixed"]
    recipe = recipe_for(**{**SETTINGS, **changes})
    policy = ActorCritic(ObservationLayout.of(_BOX), ActionLayout.of(actions), recipe)
    return new_ppo(policy.to(device), recipe)


def first_rollout(algo: PPO) -> Rollout:
    """A rollout whose actions the untrained policy sampled."""
    generator = torch.Generator().manual_seed(2)
    layout, device = algo.policy.obs_layout, algo.parameters.flat.device
    rollout = Rollout(15, 20, layout.obs_bytes, algo.policy.distribution.width, 0, device)
    obs = torch.randn(16, 20, layout.obs_bytes // 4, generator=generator)
    rollout.obs.copy_(obs.view(torch.uint8).to(device))
    with torch.no_grad():
        params, _ = algo.policy.act(rollout.obs[:-1].flatten(0, 1))
        noise = algo.policy.distribution.noise((300,), generator).to(device)
        rollout.actions.copy_(algo.policy.distribution.sample(params, noise).view_as(rollout.actions))
    rollout.rewards.copy_(torch.randn(15, 20, generator=generator).to(device))
    return rollout


# -- NumPy -------------------------------------------------------------------------------------------------------------

NUMPY_MISTAKES: dict[str, tuple[str, str]] = {
    "gradient where it is clipped": ("surrogate > clipped_surrogate]", "surrogate < clipped_surrogate]"),
    "never clipped": ("surrogate[surrogate > clipped_surrogate] = 0.0", "pass"),
    "clipped above only": ("np.clip(ratio, 1 - clip, 1 + clip)", "np.clip(ratio, 0.0, 1 + clip)"),
    "clipped below only": ("np.clip(ratio, 1 - clip, 1 + clip)", "np.clip(ratio, 1 - clip, 9.0)"),
    "clipped for either sign": (
        "surrogate[surrogate > clipped_surrogate] = 0.0",
        "surrogate[np.abs(ratio - 1.0) > clip] = 0.0",
    ),
    "other clip range": ("clip = float(self._clip_range)", "clip = 1.5 * float(self._clip_range)"),
    "sign of the policy's gradient": ("surrogate *= -1.0 / n", "surrogate *= 1.0 / n"),
    "no entropy": ("-self._coefficients.ent_coef / len(order)", "0.0"),
    "sign of the entropy": ("-self._coefficients.ent_coef / len(order)", "self._coefficients.ent_coef / len(order)"),
    "no weights": ("if batch.weights is not None:", "if False:"),
    "biased deviation": ("/ (n - 1)", "/ n"),
    "advantages not normalised": ("if self._coefficients.normalize_advantage:", "if False:"),
    "value gradient where it is clipped": ("np.where(np.abs(change) <= clip, error, np.float32(0.0))", "error"),
    "value clipped above only": ("np.clip(change, -clip, clip)", "np.clip(change, -9.0, clip)"),
    "value not clipped": ("if clip is None:", "if True:"),
    "value coefficient": ("2.0 * self._coefficients.vf_coef", "1.0 * self._coefficients.vf_coef"),
    "gradient norm": ("coefficients.max_grad_norm / (norm", "coefficients.max_grad_norm / (1.01 * norm"),
    "KL divergence ignored": ("metrics[3] > coefficients.max_kl", "False"),
}


def reports_of_first_batch(algo: PPO) -> list[str]:
    """What is reported when the first batch is prepared."""
    reports: list[str] = []
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: reports.append(f"{name}: {error}"))
    run_to_end(algo.ops.prepare(first_rollout(algo), None))
    return reports


_UNSEEN_IN_TF32 = {"biased deviation"}  # by 0.8 % at 60 samples


@pytest.mark.parametrize(
    ("precision", "mistake"),
    [(each, name) for each in ("ieee", "tf32") for name in NUMPY_MISTAKES if {each, name} - {"tf32"} - _UNSEEN_IN_TF32],
)
def test_wrong_numpy_minibatch_is_refused(
    precision: str, mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ppo_verification, "_precision", lambda ppo: precision)
    changed = with_change(f"{numpy_kernels.__name__}.ppo_minibatch", *NUMPY_MISTAKES[mistake], tmp_path)
    monkeypatch.setattr(ppo_ops, "NumpyMinibatch", changed.NumpyMinibatch)
    algo = untrained_algo(CPU)
    (report,) = reports_of_first_batch(algo)
    assert "differ from the reference's" in report
    assert ops_of(algo).learn == ops_of(algo).reference_learn


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"share_trunk": True},
        {"batch_size": 4, "clip_range_vf": None, "overlap": "off"},
        {"ent_coef": 0.0, "max_grad_norm": float("inf"), "normalize_advantage": False},
        {"clip_range": 1.5, "target_kl": None, "optimizer": "sgd"},
    ],
    ids=["all terms", "shared trunk", "4 samples", "no entropy", "wide clip range"],
)
def test_correct_numpy_minibatch_is_used_and_nothing_else_changes(changes: dict[str, Any]) -> None:
    algo = untrained_algo(CPU, **changes)
    algo.parameters.grad.fill_(7.0)
    tensors = [algo.parameters.flat, algo.parameters.grad, *algo.optimiser.state_dict().values()]
    tensors += [*vars(algo.counters).values(), torch.get_rng_state()]
    before = [tensor.detach().clone() for tensor in tensors]
    assert reports_of_first_batch(algo) == []
    assert ops_of(algo).in_numpy
    assert all(torch.equal(now, then) for now, then in zip([*tensors[:-1], torch.get_rng_state()], before))


# -- Triton ------------------------------------------------------------------------------------------------------------

_LOSS, _MINIBATCH = "unidle.kernels.triton.ppo_loss", "unidle.kernels.triton.ppo_minibatch"
_NO_GRADIENT = "has_gradient = ~(ratio * advantage > clipped * advantage)"
TRITON_MISTAKES: dict[str, tuple[str, str]] = {
    "gradient where it is clipped": (_NO_GRADIENT, _NO_GRADIENT.replace(">", "<")),
    "clipped above only": ("tl.maximum(ratio, 1.0 - clip, _PROPAGATE_NAN)", "ratio"),
    "clipped for either sign": (_NO_GRADIENT, "has_gradient = tl.abs(ratio - 1.0) <= clip"),
    "sign of the policy's gradient": ("-weight * advantage * ratio", "weight * advantage * ratio"),
    "value gradient where it is clipped": ("inside & (tl.abs(value - old) <= CLIP_RANGE_VF)", "inside"),
    "value clipped above only": ("tl.maximum(value - old, -CLIP_RANGE_VF, _PROPAGATE_NAN)", "value - old"),
    "no entropy": ("tl.where(inside, -ENT_COEF * share, 0.0)", "tl.where(inside, 0.0 * share, 0.0)"),
}


@needs_triton
@pytest.mark.parametrize("mistake", TRITON_MISTAKES)
@pytest.mark.parametrize("kernel", ["minibatch", "loss"])
def test_wrong_triton_kernel_is_refused(
    kernel: str, mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    old, new = TRITON_MISTAKES[mistake]
    in_both = mistake == "no entropy"  # the only one of these lines that both files have
    loss = with_change(_LOSS, old, new, tmp_path)
    monkeypatch.setattr(ppo_kernels, "FusedLoss", loss.FusedLoss)
    minibatch = with_change(
        _MINIBATCH, *((old, new) if in_both else ("", "")), tmp_path, imports={_LOSS: loss.__name__}
    )
    monkeypatch.setattr(ppo_kernels, "FusedMinibatch", minibatch.FusedMinibatch)
    algo = untrained_algo(DEVICE, net_arch=(16, 16) if kernel == "minibatch" else (16, 24))
    reports: list[str] = []
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: reports.append(f"{name}: {error}"))
    ops_of(algo).choose_triton(first_rollout(algo))
    assert f"PPO {kernel}: the kernel's" in reports[0]
    assert "differ from the reference's" in reports[0]


@needs_triton
@pytest.mark.parametrize("arch", [(16, 16), (16, 24)], ids=["minibatch", "loss"])
def test_correct_triton_kernels_are_used_and_nothing_else_changes(arch: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    algo = untrained_algo(DEVICE, net_arch=arch)
    ops, rollout = ops_of(algo), first_rollout(algo)
    ops.dispatch = Dispatch(lambda name, error, to: pytest.fail(f"{name}: {error}"))
    tensors = [algo.parameters.flat, algo.parameters.grad, *algo.optimiser.state_dict().values()]
    tensors += vars(algo.counters).values()
    before = [tensor.detach().clone() for tensor in tensors]
    ops.choose_triton(rollout)
    assert ops.learn != ops.reference_learn or ops.loss != ops.reference_loss
    assert all(torch.equal(now, then) for now, then in zip(tensors, before))


# -- the batches -------------------------------------------------------------------------------------------------------


def proof_of(algo: PPO) -> tuple[list[Batch], torch.Tensor, list[torch.Tensor]]:
    """The batches, their minibatch, and the ratios of each."""
    rollout = first_rollout(algo)
    batch = algo.cut(rollout, *(torch.zeros(15, 20), torch.zeros(16, 20)), *torch.zeros(2, 15, 20), None)
    order = torch.randperm(300)[:60]
    with moved_weights(algo), torch.no_grad():
        minibatch = batch.at(order)
        params, values = algo.policy(minibatch.obs)
        batches = list(proof_batches(algo, batch, order, params, values))
        ratios = []
        for each in batches:
            log_probs, _ = algo.policy.distribution.log_prob_and_entropy(params, each.at(order).actions)
            ratios.append((log_probs - each.at(order).log_probs).exp())
    return batches, order, ratios


@pytest.mark.parametrize("clip_range", [0.05, 0.2, 0.8, 1.5])
def test_ratios_lie_on_both_sides_of_the_clip_range_with_advantages_of_both_signs(clip_range: float) -> None:
    (mixed, clipped), order, ratios = proof_of(untrained_algo(CPU, clip_range=clip_range))
    low, high = 1 - min(clip_range, 0.9), 1 + min(clip_range, 0.9)
    advantages = mixed.at(order).advantages
    for positive in (True, False):
        ratio = ratios[0][(advantages - advantages.mean() > 0) == positive]
        for outcome in (ratio < low, (low < ratio) & (ratio < 1), (ratio > 1) & (ratio < high), ratio > high):
            assert 0.15 < float(outcome.float().mean()) < 0.35
    positive = clipped.at(order).advantages > clipped.at(order).advantages.mean()
    assert torch.equal(positive, ratios[1] > high)
    assert torch.equal(~positive, ratios[1] < low)


def test_old_values_lie_inside_the_clip_range_and_on_both_sides() -> None:
    algo = untrained_algo(CPU, clip_range_vf=0.3)
    (mixed, _), order, _ = proof_of(algo)
    with moved_weights(algo), torch.no_grad():
        _, values = algo.policy(mixed.at(order).obs)
    change = values - mixed.at(order).values
    shares = [float(part.float().mean()) for part in (change < -0.3, change.abs() < 0.3, change > 0.3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.02)


def test_errors_of_values_have_both_signs_and_do_not_cancel() -> None:
    """Else the critic's gradient is a small difference of large sums, and rounding refuses a correct kernel."""
    algo = untrained_algo(CPU)
    (mixed, _), order, _ = proof_of(algo)
    with moved_weights(algo), torch.no_grad():
        _, values = algo.policy(mixed.at(order).obs)
    errors = values - mixed.at(order).returns
    assert 0.3 < float((errors > 0).float().mean()) < 0.7
    assert float(errors.mean()) > 0.3 * float(errors.abs().mean())
