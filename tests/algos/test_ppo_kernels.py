"""PPO's Triton kernels against its references, on a GPU or in Triton's interpreter."""

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

an_algo = partial(an_algo_on, device=DEVICE)


def a_rollout(batch: Batch, state_size: int = 0) -> Rollout:
    """15 steps of 20 environments."""
    rollout = Rollout(15, 20, batch.obs.shape[-1], batch.actions.shape[-1], state_size, DEVICE)
    rollout.starts[:, ::3] = torch.arange(16, device=DEVICE)[:, None] % 4 == 0
    rollout.states.normal_(generator=torch.Generator(DEVICE).manual_seed(2))
    rollout.obs.copy_(batch.obs.view_as(rollout.obs))
    rollout.actions.copy_(batch.actions[:300].view_as(rollout.actions))
    rollout.rewards.copy_(batch.returns[:300].view_as(rollout.rewards))
    return rollout


def kernels_of(algo: PPO) -> tuple[Any, Any]:
    """What evaluates, and what learns."""
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    assert ppo_kernels.small_mlp_unsupported(algo.policy) is None
    return ppo_kernels.SmallNetwork(algo.policy), ppo_kernels.new_minibatch(algo)


def use_loss_and_step_kernels(algo: PPO) -> None:
    """Loss and step for a network of any shape."""
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    ops = ops_of(algo)
    assert ppo_kernels.loss_unsupported(algo) is None
    ops.loss, ops.optimiser_step = ppo_kernels.NetworkLoss(algo), ppo_kernels.new_step(algo)


def both_gradients(
    action_space: spaces.Space, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient, what is logged) by autograd, by autograd from the kernels' loss, and by the kernel of all."""
    algo = an_algo(action_space, changes, masked=masked)
    batch = a_batch(algo.policy, ActionLayout.of(action_space), weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    return [
        gradient_by(algo, compute, batch, order)
        for compute in (ops_of(algo).gradient, by_fused_loss(algo), kernels_of(algo)[1].gradient)
    ]


def by_fused_loss(algo: PPO) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """The gradient through the kernels' loss."""
    ops = ops_of(algo)

    def gradient(batch: Batch, order: torch.Tensor) -> torch.Tensor:
        reference = ops.loss, ops.optimiser_step
        use_loss_and_step_kernels(algo)
        metrics = ops.gradient(batch, order)
        ops.loss, ops.optimiser_step = reference
        return metrics

    return gradient


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["fresh", "stale"])
def test_the_gradient_is_that_of_autograd_for_every_kind_of_action(name: str, weighted: bool) -> None:
    assert_close(both_gradients(ACTIONS[name], {"ent_coef": 0.02}, weighted=weighted))


@pytest.mark.parametrize("name", ["one choice", "heads", "both"])
def test_what_a_mask_forbids_has_no_part_in_the_gradient(name: str) -> None:
    assert_close(both_gradients(ACTIONS[name], {"ent_coef": 0.02}, masked=True))


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_is_that_of_autograd_for_every_recipe(name: str) -> None:
    assert_close(both_gradients(ACTIONS["both"], RECIPES[name]))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("recurrent", "batch_size", "length"), [("none", 60, 1), ("gru", 50, 5), ("gru", 60, 15)])
def test_the_loss_alone_is_for_any_network_and_for_sequences_and_pieces(
    recurrent: Any, batch_size: int, length: int, pieces: int
) -> None:
    changes = {"net_arch": (48,), "share_trunk": True, "recurrent": recurrent, "recurrent_size": 8, "ent_coef": 0.1}
    algo = an_algo(ACTIONS["both"], {**changes, "n_envs": 20, "n_steps": 15, "batch_size": batch_size})
    assert algo.sequence_length == length
    seen = a_batch(an_algo(ACTIONS["both"], {}).policy, ActionLayout.of(ACTIONS["both"]), weighted=True, masked=False)
    rollout = a_rollout(seen, algo.policy.state_size)
    log_probs, values = algo.ops.evaluate(rollout)
    noise = torch.randn(3, 15, 20, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = algo.cut(rollout, log_probs + 0.3 * noise[0], values, noise[1], values[:-1] + noise[2], noise[2].exp())
    order = torch.randperm(len(batch.obs), device=DEVICE)[: ops_of(algo).orders.shape[1]]
    found = [gradient_by(algo, ops_of(algo).gradient, batch, order)]
    ops_of(algo).micro_batches.count = pieces
    found.append(gradient_by(algo, by_fused_loss(algo), batch, order))
    padding = found[0][0] == 7.0
    found[1][0][padding] = 7.0  # which is cleared where pieces are added up
    assert_close(found)


MANY: dict[str, spaces.Space] = {
    "choices": spaces.Discrete(128),
    "both": spaces.Dict(turn=spaces.MultiDiscrete([80, 10]), push=spaces.Box(-1, 1, (30,))),
}


@pytest.mark.parametrize("name", MANY)
def test_the_loss_alone_is_for_many_actions(name: str) -> None:
    algo = an_algo(MANY[name], {"ent_coef": 0.02})
    batch = a_batch(algo.policy, ActionLayout.of(MANY[name]), weighted=True, masked=False)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    assert_close([gradient_by(algo, compute, batch, order) for compute in (ops_of(algo).gradient, by_fused_loss(algo))])


@pytest.mark.parametrize("what", ["log_probs", "returns"])
def test_what_is_not_a_number_is_seen_in_all_that_it_is_part_of(what: str) -> None:
    algo = an_algo(ACTIONS["reals"], {"clip_range_vf": 0.2})
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS["reals"]), weighted=False, masked=False)
    getattr(batch, what)[3] = torch.nan
    order = torch.arange(BATCH, device=DEVICE)
    (plain, logged), (fused, also_logged) = (
        gradient_by(algo, compute, batch, order) for compute in (ops_of(algo).gradient, by_fused_loss(algo))
    )
    assert logged.isnan().any()
    assert torch.equal(logged.isnan(), also_logged.isnan())
    assert torch.equal(plain.isnan(), fused.isnan())


def test_more_actions_than_a_kernel_takes_are_left_to_autograd() -> None:
    pytest.importorskip("triton")
    from unidle.algos.ppo_kernels import loss_unsupported

    assert loss_unsupported(an_algo(spaces.Discrete(128), {})) is None
    assert "up to 128 outputs" in str(loss_unsupported(an_algo(spaces.Discrete(129), {})))
    assert "8 discrete actions" in str(loss_unsupported(an_algo(spaces.MultiDiscrete([2] * 9), {})))


@pytest.mark.parametrize("name", LEARNING)
def test_steps_clip_count_and_stop_as_the_plain_ones(name: str) -> None:
    def around(algo: PPO) -> Callable[[Batch, torch.Tensor], None]:
        use_loss_and_step_kernels(algo)
        return ops_of(algo).reference_learn

    ways = (lambda algo: ops_of(algo).reference_learn, around, lambda algo: kernels_of(algo)[1].learn)
    plain, *fused = (after_six_steps(an_algo(ACTIONS["both"], LEARNING[name]), way) for way in ways)
    assert bool(plain[-1]) == ("target_kl" in LEARNING[name])
    assert 0 < float(plain[-2]) <= 6
    for states in fused:
        for ours, theirs in zip(states, plain):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
def test_a_rollout_is_evaluated_as_by_the_plain_formulas(name: str, masked: bool) -> None:
    changes = {"n_envs": 20, "n_steps": 16, "batch_size": 64, "normalize_obs": True}
    algo = an_algo(ACTIONS[name], changes, masked=masked)
    actions = ActionLayout.of(ACTIONS[name])
    batch = a_batch(algo.policy, actions, weighted=False, masked=masked)
    rollout = a_rollout(batch)
    evaluation, _ = kernels_of(algo)
    for ours, theirs in zip(evaluation.evaluate(rollout), algo.ops.evaluate(rollout)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    acted = copy.deepcopy(algo.policy)
    FlatParameters(acted)
    assert torch.equal(evaluation.log_probs(acted, rollout), evaluation.evaluate(rollout)[0])  # so that it weighs 1
    for parameter in acted.parameters():
        parameter.data += 0.1
    ours, theirs = evaluation.log_probs(acted, rollout), algo.ops.log_probs(acted, rollout)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, evaluation.evaluate(rollout)[0], rtol=1e-2)
    obs = batch.obs[:77, 0]
    torch.testing.assert_close(evaluation.values(obs, obs), algo.policy.value(obs), rtol=1e-4, atol=1e-5)


def test_in_bf16_values_are_not_rounded_to_bf16() -> None:
    algo = an_algo(ACTIONS["reals"], {"precision": "bf16", "net_arch": (32, 16)})
    algo.policy.critic_head.bias.data.fill_(300.0)
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS["reals"]), weighted=False, masked=False)
    with torch.no_grad():
        values = algo.policy.value(batch.obs[:, 0])
    assert (values.bfloat16().float() - values).abs().mean() > 0.2  # of the 2 that lie between two such numbers


_NO_BF16 = pytest.mark.skipif(INTERPRETED, reason="NumPy, by which kernels are interpreted, has no bf16")


@pytest.mark.parametrize(
    ("arch", "replaced"),
    [((32, 32), {"evaluate", "log_probs", "values", "learn"}), ((32, 16), {"loss", "optimiser_step"})],
)
@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("precision", ["tf32", pytest.param("bf16", marks=_NO_BF16)])
def test_kernels_replace_the_references_where_they_agree(
    precision: str, overlap: str, arch: tuple[int, int], replaced: set[str]
) -> None:
    algo, rollout = to_prove({"precision": precision, "overlap": overlap, "net_arch": arch})
    before, references = algo.parameters.flat.detach().clone(), implementations(algo)
    pytest.importorskip("triton")
    ops_of(algo).choose_triton(rollout)
    assert changed(algo, references) == {"shuffle", "gae", *replaced}
    assert torch.equal(algo.parameters.flat, before)
    assert not algo.counters.sums.any()
    assert set(ops_of(algo).dispatch.fallbacks) == (set() if arch == (32, 32) else {"PPO evaluation", "PPO minibatch"})


OPERATIONS = ("shuffle", "gae", "evaluate", "log_probs", "values", "loss", "optimiser_step", "learn")


def implementations(algo: PPO) -> dict[str, Any]:
    return {name: getattr(algo.ops, name) for name in OPERATIONS}


def changed(algo: PPO, before: dict[str, Any]) -> set[str]:
    """The operations that have another implementation than before."""
    return {name for name, now in implementations(algo).items() if now != before[name]}


def to_prove(changes: dict[str, Any], network: NetworkFactory | None = None) -> tuple[PPO, Rollout]:
    """An algorithm and a rollout to try its kernels on; rewards are large, as some are."""
    algo = an_algo(ACTIONS["both"], {"n_envs": 20, "n_steps": 15, "batch_size": 60, **changes}, network=network)
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: pytest.fail(f"{name} {to}: {error}"))
    rollout = a_rollout(a_batch(algo.policy, ActionLayout.of(ACTIONS["both"]), weighted=False, masked=False))
    rollout.rewards *= 100
    return algo, rollout


def _spoil(results: list[torch.Tensor], at: int, by: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    results[at] = by(results[at])
    return results


WRONG: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {  # place in what the loss's kernels give
    "metrics": (1, lambda means: means * torch.tensor([1, 1, 0.5, 1, 1], device=DEVICE)),
    "gradients by logits": (2, torch.neg),
    "gradients by means": (3, torch.zeros_like),
    "gradients by log_std": (4, lambda slopes: 1.1 * slopes),
    "gradients by values": (5, lambda slopes: 0.5 * slopes),
}


@pytest.mark.parametrize("what", [*WRONG, "step", "advantages"])
def test_a_wrong_kernel_is_reported_and_the_others_are_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    algo, rollout = to_prove({"net_arch": (32, 16)})
    reports: list[str] = []
    ops_of(algo).dispatch = Dispatch(lambda name, error, to: reports.append(str(error)))
    if what == "advantages":
        gae = ppo_kernels.gae.gae
        monkeypatch.setattr(ppo_kernels.gae, "gae", lambda *of: [1.1 * part for part in gae(*of)])
        wrong = "gae"
    elif what == "step":
        step = ppo_kernels.FusedStep.__call__
        monkeypatch.setattr(ppo_kernels.FusedStep, "__call__", lambda self, metrics: step(self, 2 * metrics))
        wrong = "optimiser_step"
    else:
        launch = ppo_kernels.FusedLoss.launch
        monkeypatch.setattr(ppo_kernels.FusedLoss, "launch", lambda *of: _spoil(launch(*of), *WRONG[what]))
        wrong = "loss"
    references = implementations(algo)
    ops_of(algo).choose_triton(rollout)
    assert reports == [f"the kernel's {what} differ from the reference's"]
    assert changed(algo, references) == {"shuffle", "gae", "loss", "optimiser_step"} - {wrong}


def test_a_network_that_draws_and_counts_is_proven_too_and_is_then_as_before() -> None:
    pytest.importorskip("triton")

    def network(observations: spaces.Space, actions: spaces.Space) -> torch.nn.Module:
        frozen = torch.nn.Linear(5, 8).requires_grad_(False)
        return torch.nn.Sequential(frozen, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))

    algo, rollout = to_prove({}, network)
    algo.policy.train()
    kept = [*algo.policy.parameters(), *algo.policy.buffers()]
    before, drawn = [tensor.detach().clone() for tensor in kept], random_states()
    ops_of(algo).choose_triton(rollout)
    assert ops_of(algo).loss != ops_of(algo).reference_loss
    for parameter in algo.policy.parameters():
        if parameter.requires_grad:
            algo.parameters.grad_of(parameter).zero_()
    assert not algo.parameters.grad.any()  # nothing was written between them
    assert all(torch.equal(now, then) for now, then in zip(kept, before))
    assert all(torch.equal(now, then) for now, then in zip(random_states(), drawn))


def random_states() -> list[torch.Tensor]:
    """Of the generators that layers draw from."""
    return [torch.get_rng_state(), *([] if INTERPRETED else [torch.cuda.get_rng_state()])]
