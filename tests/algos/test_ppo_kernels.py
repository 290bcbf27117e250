"""PPO's Triton kernels against the PyTorch reference, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
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

from unidle.algos.ppo import PPO, Batch
from unidle.buffers.rollout import Rollout
from unidle.kernels.dispatch import Dispatch
from unidle.nn.actor_critic import NetworkFactory
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.spaces.actions import ActionLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

make_algo = partial(make_algo_on, device=DEVICE)


def make_rollout(batch: Batch, state_size: int = 0) -> Rollout:
    """15 steps of 20 environments."""
    rollout = Rollout(15, 20, batch.obs.shape[-1], batch.actions.shape[-1], state_size, DEVICE)
    rollout.starts[:, ::3] = torch.arange(16, device=DEVICE)[:, None] % 4 == 0
    rollout.states.normal_(generator=torch.Generator(DEVICE).manual_seed(2))
    rollout.obs.copy_(batch.obs.view_as(rollout.obs))
    rollout.actions.copy_(batch.actions[:300].view_as(rollout.actions))
    rollout.rewards.copy_(batch.returns[:300].view_as(rollout.rewards))
    return rollout


def kernels_of(algo: PPO) -> tuple[Any, Any]:
    """(kernel for rollout evaluation, kernel for minibatches)"""
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    assert ppo_kernels.small_mlp_unsupported(algo.policy) is None
    return ppo_kernels.SmallNetwork(algo.policy), ppo_kernels.new_minibatch(algo)


def use_loss_and_step_kernels(algo: PPO) -> None:
    """Uses the kernels for loss and optimiser step that support networks of any shape."""
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    ops = ops_of(algo)
    assert ppo_kernels.loss_unsupported(algo) is None
    ops.loss, ops.optimiser_step = ppo_kernels.NetworkLoss(algo), ppo_kernels.new_step(algo)


def gradients_of_all_implementations(
    action_space: spaces.Space, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient, metrics) from autograd, from autograd through the loss kernel, and from the minibatch kernel."""
    algo = make_algo(action_space, changes, masked=masked)
    batch = make_batch(algo.policy, ActionLayout.of(action_space), weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    return [
        compute_gradient(algo, compute, batch, order)
        for compute in (ops_of(algo).gradient, fused_loss_gradient(algo), kernels_of(algo)[1].gradient)
    ]


def fused_loss_gradient(algo: PPO) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """Computes the gradient by autograd through the loss kernel."""
    ops = ops_of(algo)

    def gradient(batch: Batch, order: torch.Tensor) -> torch.Tensor:
        reference = ops.loss, ops.optimiser_step
        use_loss_and_step_kernels(algo)
        metrics = ops.gradient(batch, order)
        ops.loss, ops.optimiser_step = reference
        return metrics

    return gradient


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_gradient_matches_autograd_for_each_action_space(name: str, weighted: bool) -> None:
    assert_close(gradients_of_all_implementations(ACTIONS[name], {"ent_coef": 0.02}, weighted=weighted))


@pytest.mark.parametrize("name", ["binary", "multi-discrete", "mixed"])
def test_gradient_matches_autograd_with_masked_actions(name: str) -> None:
    assert_close(gradients_of_all_implementations(ACTIONS[name], {"ent_coef": 0.02}, masked=True))


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_matches_autograd_for_each_recipe(name: str) -> None:
    assert_close(gradients_of_all_implementations(ACTIONS["mixed"], RECIPES[name]))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("recurrent", "batch_size", "length"), [("none", 60, 1), ("gru", 50, 5), ("gru", 60, 15)])
def test_loss_kernel_supports_recurrent_networks_and_micro_batches(
    recurrent: Any, batch_size: int, length: int, micro_batches: int
) -> None:
    changes = {"net_arch": (48,), "share_trunk": True, "recurrent": recurrent, "recurrent_size": 8, "ent_coef": 0.1}
    algo = make_algo(ACTIONS["mixed"], {**changes, "n_envs": 20, "n_steps": 15, "batch_size": batch_size})
    assert algo.sequence_length == length
    steps = make_batch(
        make_algo(ACTIONS["mixed"], {}).policy, ActionLayout.of(ACTIONS["mixed"]), weighted=True, masked=False
    )
    rollout = make_rollout(steps, algo.policy.state_size)
    log_probs, values = algo.ops.evaluate(rollout)
    noise = torch.randn(3, 15, 20, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = algo.cut(rollout, log_probs + 0.3 * noise[0], values, noise[1], values[:-1] + noise[2], noise[2].exp())
    order = torch.randperm(len(batch.obs), device=DEVICE)[: ops_of(algo).orders.shape[1]]
    gradients = [compute_gradient(algo, ops_of(algo).gradient, batch, order)]
    ops_of(algo).micro_batches.count = micro_batches
    gradients.append(compute_gradient(algo, fused_loss_gradient(algo), batch, order))
    padding = gradients[0][0] == 7.0
    gradients[1][0][padding] = 7.0  # adding up micro-batches clears the padding
    assert_close(gradients)


MANY_ACTIONS: dict[str, spaces.Space] = {
    "choices": spaces.Discrete(128),
    "mixed": spaces.Dict(turn=spaces.MultiDiscrete([80, 10]), push=spaces.Box(-1, 1, (30,))),
}


@pytest.mark.parametrize("name", MANY_ACTIONS)
def test_loss_kernel_supports_many_actions(name: str) -> None:
    algo = make_algo(MANY_ACTIONS[name], {"ent_coef": 0.02})
    batch = make_batch(algo.policy, ActionLayout.of(MANY_ACTIONS[name]), weighted=True, masked=False)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    assert_close(
        [
            compute_gradient(algo, compute, batch, order)
            for compute in (ops_of(algo).gradient, fused_loss_gradient(algo))
        ]
    )


@pytest.mark.parametrize("part", ["log_probs", "returns"])
def test_nan_propagates_as_in_autograd(part: str) -> None:
    algo = make_algo(ACTIONS["box"], {"clip_range_vf": 0.2})
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS["box"]), weighted=False, masked=False)
    getattr(batch, part)[3] = torch.nan
    order = torch.arange(BATCH, device=DEVICE)
    (plain, logged), (fused, also_logged) = (
        compute_gradient(algo, compute, batch, order) for compute in (ops_of(algo).gradient, fused_loss_gradient(algo))
    )
    assert logged.isnan().any()
    assert torch.equal(logged.isnan(), also_logged.isnan())
    assert torch.equal(plain.isnan(), fused.isnan())


def test_loss_kernel_rejects_too_many_actions() -> None:
    pytest.importorskip("triton")
    from unidle.algos.ppo_kernels import loss_unsupported

    assert loss_unsupported(make_algo(spaces.Discrete(128), {})) is None
    assert "up to 128 outputs" in str(loss_unsupported(make_algo(spaces.Discrete(129), {})))
    assert "8 discrete actions" in str(loss_unsupported(make_algo(spaces.MultiDiscrete([2] * 9), {})))


@pytest.mark.parametrize("name", UPDATE_SETTINGS)
def test_optimiser_steps_match_reference(name: str) -> None:
    def with_loss_and_step_kernels(algo: PPO) -> Callable[[Batch, torch.Tensor], None]:
        use_loss_and_step_kernels(algo)
        return ops_of(algo).reference_learn

    learners = (
        lambda algo: ops_of(algo).reference_learn,
        with_loss_and_step_kernels,
        lambda algo: kernels_of(algo)[1].learn,
    )
    plain, *fused = (
        state_after_six_updates(make_algo(ACTIONS["mixed"], UPDATE_SETTINGS[name]), learner) for learner in learners
    )
    assert bool(plain[-1]) == ("target_kl" in UPDATE_SETTINGS[name])
    assert 0 < float(plain[-2]) <= 6
    for states in fused:
        for ours, theirs in zip(states, plain):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_rollout_evaluation_matches_reference(name: str, masked: bool) -> None:
    changes = {"n_envs": 20, "n_steps": 16, "batch_size": 64, "normalize_obs": True}
    algo = make_algo(ACTIONS[name], changes, masked=masked)
    actions = ActionLayout.of(ACTIONS[name])
    batch = make_batch(algo.policy, actions, weighted=False, masked=masked)
    rollout = make_rollout(batch)
    evaluation, _ = kernels_of(algo)
    for ours, theirs in zip(evaluation.evaluate(rollout), algo.ops.evaluate(rollout)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    acting_policy = copy.deepcopy(algo.policy)
    FlatParameters(acting_policy)
    # With equal weights, importance weights must be exactly 1.
    assert torch.equal(evaluation.log_probs(acting_policy, rollout), evaluation.evaluate(rollout)[0])
    for parameter in acting_policy.parameters():
        parameter.data += 0.1
    ours, theirs = evaluation.log_probs(acting_policy, rollout), algo.ops.log_probs(acting_policy, rollout)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, evaluation.evaluate(rollout)[0], rtol=1e-2)
    obs = batch.obs[:77, 0]
    torch.testing.assert_close(evaluation.values(obs, obs), algo.policy.value(obs), rtol=1e-4, atol=1e-5)


def test_bf16_precision_keeps_values_in_float32() -> None:
    algo = make_algo(ACTIONS["box"], {"precision": "bf16", "net_arch": (32, 16)})
    algo.policy.critic_head.bias.data.fill_(300.0)
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS["box"]), weighted=False, masked=False)
    with torch.no_grad():
        values = algo.policy.value(batch.obs[:, 0])
    assert (values.bfloat16().float() - values).abs().mean() > 0.2  # bf16 numbers of this size are 2 apart


_NO_BF16 = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter uses NumPy, which has no bf16")


@pytest.mark.parametrize(
    ("arch", "replaced"),
    [((32, 32), {"evaluate", "log_probs", "values", "learn"}), ((32, 16), {"loss", "optimiser_step"})],
)
@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("precision", ["tf32", pytest.param("bf16", marks=_NO_BF16)])
def test_verified_kernels_replace_the_reference(
    precision: str, overlap: str, arch: tuple[int, int], replaced: set[str]
) -> None:
    algo, rollout = make_algo_and_rollout({"precision": precision, "overlap": overlap, "net_arch": arch})
    before, references = algo.parameters.flat.detach().clone(), implementations(algo)
    pytest.importorskip("triton")
    ops_of(algo).choose_triton(rollout)
    assert changed_operations(algo, references) == {"shuffle", "gae", *replaced}
    assert torch.equal(algo.parameters.flat, before)
    assert not algo.counters.sums.any()
    assert set(ops_of(algo).dispatch.fallbacks) == (set() if arch == (32, 32) else {"PPO evaluation", "PPO minibatch"})


def test_kernels_for_equal_networks_decline_a_critic_of_another_size() -> None:
    pytest.importorskip("triton")
    algo, rollout = make_algo_and_rollout({"net_arch": (32, 32), "critic_arch": (64, 64)})
    references = implementations(algo)
    ops_of(algo).choose_triton(rollout)
    assert changed_operations(algo, references) == {"shuffle", "gae", "loss", "optimiser_step"}
    reason = "the actor has hidden layers (32, 32) and the critic (64, 64): kernels take equal ones"
    assert ops_of(algo).dispatch.fallbacks == {"PPO evaluation": reason, "PPO minibatch": reason}


def test_kernels_that_fuse_adam_decline_another_optimiser() -> None:
    pytest.importorskip("triton")
    algo, rollout = make_algo_and_rollout({"net_arch": (32, 32), "optimizer": "sgd", "momentum": 0.9})
    references = implementations(algo)
    ops_of(algo).choose_triton(rollout)
    assert changed_operations(algo, references) == {"shuffle", "gae", "evaluate", "log_probs", "values", "loss"}
    reason = "the optimiser is sgd: kernels take adam"
    assert ops_of(algo).dispatch.fallbacks == {"PPO minibatch": reason, "PPO step": reason}


OPERATIONS = ("shuffle", "gae", "evaluate", "log_probs", "values", "loss", "optimiser_step", "learn")


def implementations(algo: PPO) -> dict[str, Any]:
    return {name: getattr(algo.ops, name) for name in OPERATIONS}


def changed_operations(algo: PPO, before: dict[str, Any]) -> set[str]:
    """The operations whose implementation is no longer the one in `before`."""
    return {name for name, now in implementations(algo).items() if now != before[name]}


def make_algo_and_rollout(changes: dict[str, Any], network: NetworkFactory | None = None) -> tuple[PPO, Rollout]:
    """An algorithm and a rollout to verify its kernels on; rewards are large, as in some environments."""
    algo = make_algo(ACTIONS["mixed"], {"n_envs": 20, "n_steps": 15, "batch_size": 60, **changes}, network=network)
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: pytest.fail(f"{name} {to}: {error}"))
    rollout = make_rollout(make_batch(algo.policy, ActionLayout.of(ACTIONS["mixed"]), weighted=False, masked=False))
    rollout.rewards *= 100
    return algo, rollout


def _corrupt(results: list[torch.Tensor], at: int, by: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    results[at] = by(results[at])
    return results


# By output of the loss kernel: its index, and how to corrupt it.
CORRUPTIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "metrics": (1, lambda means: means * torch.tensor([1, 1, 0.5, 1, 1], device=DEVICE)),
    "logit gradients": (2, torch.neg),
    "mean gradients": (3, torch.zeros_like),
    "log_std gradients": (4, lambda slopes: 1.1 * slopes),
    "value gradients": (5, lambda slopes: 0.5 * slopes),
}


@pytest.mark.parametrize("part", [*CORRUPTIONS, "step", "advantages"])
def test_wrong_kernel_is_reported_and_correct_ones_are_used(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    algo, rollout = make_algo_and_rollout({"net_arch": (32, 16)})
    reports: list[str] = []
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: reports.append(str(error)))
    if part == "advantages":
        gae = ppo_kernels.gae.gae
        monkeypatch.setattr(ppo_kernels.gae, "gae", lambda *of: [1.1 * part for part in gae(*of)])
        wrong = "gae"
    elif part == "step":
        step = ppo_kernels.FusedStep.__call__
        monkeypatch.setattr(ppo_kernels.FusedStep, "__call__", lambda self, metrics: step(self, 2 * metrics))
        wrong = "optimiser_step"
    else:
        launch = ppo_kernels.FusedLoss.launch
        monkeypatch.setattr(ppo_kernels.FusedLoss, "launch", lambda *of: _corrupt(launch(*of), *CORRUPTIONS[part]))
        wrong = "loss"
    references = implementations(algo)
    ops_of(algo).choose_triton(rollout)
    assert reports == [f"the kernel's {part} differ from the reference's"]
    assert changed_operations(algo, references) == {"shuffle", "gae", "loss", "optimiser_step"} - {wrong}


def test_verification_leaves_weights_buffers_and_rng_unchanged() -> None:
    pytest.importorskip("triton")

    def network(observations: spaces.Space, actions: spaces.Space) -> torch.nn.Module:
        frozen = torch.nn.Linear(5, 8).requires_grad_(False)
        return torch.nn.Sequential(frozen, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))

    algo, rollout = make_algo_and_rollout({}, network)
    algo.policy.train()
    tensors = [*algo.policy.parameters(), *algo.policy.buffers()]
    before, drawn = [tensor.detach().clone() for tensor in tensors], rng_states()
    ops_of(algo).choose_triton(rollout)
    assert ops_of(algo).loss != ops_of(algo).reference_loss
    for parameter in algo.policy.parameters():
        if parameter.requires_grad:
            algo.parameters.grad_of(parameter).zero_()
    assert not algo.parameters.grad.any()  # the padding between parameters is not written
    assert all(torch.equal(now, then) for now, then in zip(tensors, before))
    assert all(torch.equal(now, then) for now, then in zip(rng_states(), drawn))


def rng_states() -> list[torch.Tensor]:
    """The states of the global generators, which layers draw from."""
    return [torch.get_rng_state(), *([] if INTERPRETED else [torch.cuda.get_rng_state()])]
