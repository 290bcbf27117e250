"""PPO's kernels against its plain formulas, on a GPU or (TRITON_INTERPRET=1) step by step on the CPU."""

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
)
from ppo_minibatches import an_algo as an_algo_on

from unidle.algos.ppo import PPO, Batch
from unidle.buffers.rollout import Rollout, gae
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
    from unidle.algos.fused_evaluation import FusedEvaluation
    from unidle.algos.fused_minibatch import FusedMinibatch
    from unidle.kernels.triton.small_mlp import SmallMlp
    from unidle.nn.describe import describe_small_mlp

    shape = describe_small_mlp(algo.policy)
    assert isinstance(shape, SmallMlp)
    return FusedEvaluation(algo.policy, shape), FusedMinibatch(algo, shape)


def around_network(algo: PPO) -> dict[str, Any]:
    """Loss and step for a network of whatever shape."""
    pytest.importorskip("triton")
    from unidle.algos.fused_loss import FusedLoss, has_fused_loss
    from unidle.algos.fused_step import FusedStep

    assert has_fused_loss(algo.policy)
    return {"loss": FusedLoss(algo), "step": FusedStep(algo)}


def both_gradients(
    action_space: spaces.Space, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient, what is logged) by autograd, by autograd from the kernels' loss, and by the kernel of all."""
    algo = an_algo(action_space, changes, masked=masked)
    batch = a_batch(algo.policy, ActionLayout.of(action_space), weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    return [
        gradient_by(algo, compute, batch, order)
        for compute in (algo.gradient, by_fused_loss(algo), kernels_of(algo)[1].gradient)
    ]


def by_fused_loss(algo: PPO) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """`PPO.gradient` with the kernels' loss."""
    plain, fused = algo.ways, algo.ways._replace(**around_network(algo))

    def gradient(batch: Batch, order: torch.Tensor) -> torch.Tensor:
        algo.ways = fused
        logged = algo.gradient(batch, order)
        algo.ways = plain
        return logged

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
    log_probs, values = algo.ways.evaluate(rollout)
    noise = torch.randn(3, 15, 20, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = algo.cut(rollout, log_probs + 0.3 * noise[0], values, noise[1], values[:-1] + noise[2], noise[2].exp())
    order = torch.randperm(len(batch.obs), device=DEVICE)[: algo.orders.shape[1]]
    found = [gradient_by(algo, algo.gradient, batch, order)]
    algo.pieces.count = pieces
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
    assert_close([gradient_by(algo, compute, batch, order) for compute in (algo.gradient, by_fused_loss(algo))])


@pytest.mark.parametrize("what", ["log_probs", "returns"])
def test_what_is_not_a_number_is_seen_in_all_that_it_is_part_of(what: str) -> None:
    algo = an_algo(ACTIONS["reals"], {"clip_range_vf": 0.2})
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS["reals"]), weighted=False, masked=False)
    getattr(batch, what)[3] = torch.nan
    order = torch.arange(BATCH, device=DEVICE)
    (plain, logged), (fused, also_logged) = (
        gradient_by(algo, compute, batch, order) for compute in (algo.gradient, by_fused_loss(algo))
    )
    assert logged.isnan().any()
    assert torch.equal(logged.isnan(), also_logged.isnan())
    assert torch.equal(plain.isnan(), fused.isnan())


def test_more_actions_than_a_kernel_takes_are_left_to_autograd() -> None:
    pytest.importorskip("triton")
    from unidle.algos.fused_loss import has_fused_loss

    assert has_fused_loss(an_algo(spaces.Discrete(128), {}).policy)
    assert not has_fused_loss(an_algo(spaces.Discrete(129), {}).policy)
    assert not has_fused_loss(an_algo(spaces.MultiDiscrete([2] * 9), {}).policy)


@pytest.mark.parametrize("name", LEARNING)
def test_steps_clip_count_and_stop_as_the_plain_ones(name: str) -> None:
    def around(algo: PPO) -> Callable[[Batch, torch.Tensor], None]:
        algo.ways = algo.ways._replace(**around_network(algo))
        return algo.steps

    ways = (lambda algo: algo.steps, around, lambda algo: kernels_of(algo)[1].learn)
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
    for ours, theirs in zip(evaluation.rollout(rollout), algo.ways.evaluate(rollout)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    acted = copy.deepcopy(algo.policy)
    FlatParameters(acted)
    assert torch.equal(evaluation.score(acted, rollout), evaluation.rollout(rollout)[0])  # so that it weighs 1
    for parameter in acted.parameters():
        parameter.data += 0.1
    ours, theirs = evaluation.score(acted, rollout), algo.ways.score(acted, rollout)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, evaluation.rollout(rollout)[0], rtol=1e-2)
    obs = batch.obs[:77, 0]
    torch.testing.assert_close(evaluation.values(obs), algo.policy.value(obs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("steps", "n_envs"), [(1, 1), (7, 65), (33, 128)])
def test_advantages_are_those_of_the_plain_scan(steps: int, n_envs: int, traced: bool) -> None:
    pytest.importorskip("triton")
    from unidle.buffers.fused_gae import fused_gae

    generator = torch.Generator().manual_seed(steps)
    rewards, bootstrap = torch.randn(2, steps, n_envs, generator=generator).to(DEVICE)
    values = torch.randn(steps + 1, n_envs, generator=generator).to(DEVICE)
    draw = torch.rand(steps, n_envs, generator=generator).to(DEVICE)
    importance = (2 * torch.rand(steps, n_envs, generator=generator)).to(DEVICE) if traced else None
    of_steps = rewards, values, bootstrap, draw < 0.1, draw > 0.9, 0.97, 0.9, importance
    for ours, theirs in zip(fused_gae(*of_steps), gae(*of_steps)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 4097])
def test_a_shuffle_leaves_nothing_out_and_its_key_decides_the_order(n: int) -> None:
    pytest.importorskip("triton")
    from unidle.buffers.fused_shuffle import fused_shuffle

    first, again, other = (fused_shuffle(n, torch.Generator(DEVICE).manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.sort().values.cpu(), torch.arange(n))
    assert torch.equal(first, again)
    assert n < 64 or not torch.equal(first, other)


def test_every_number_comes_to_every_place_as_often_as_to_any_other() -> None:
    pytest.importorskip("triton")
    from unidle.buffers.fused_shuffle import fused_shuffle

    n, times = 12, 120 if INTERPRETED else 3000
    generator = torch.Generator(DEVICE).manual_seed(3)
    seen = torch.zeros(n, n)
    following = torch.zeros(n, n)
    for _ in range(times):
        order = fused_shuffle(n, generator).cpu()
        seen[torch.arange(n), order] += 1
        following[order[:-1], order[1:]] += 1
    expected = times / n  # also of each ordered pair: n − 1 of n (n − 1) are neighbours
    # Chi-squared with 121 and about as many degrees of freedom: mean 121, deviation 16.
    assert ((seen - expected).square() / expected).sum() < 121 + 5 * 16
    off = ~torch.eye(n, dtype=torch.bool)
    assert ((following - expected)[off].square() / expected).sum() < 121 + 5 * 16


def test_in_bf16_values_are_not_rounded_to_bf16() -> None:
    algo = an_algo(ACTIONS["reals"], {"precision": "bf16", "net_arch": (32, 16)})
    algo.policy.critic_head.bias.data.fill_(300.0)
    batch = a_batch(algo.policy, ActionLayout.of(ACTIONS["reals"]), weighted=False, masked=False)
    with torch.no_grad():
        values = algo.policy.value(batch.obs[:, 0])
    assert (values.bfloat16().float() - values).abs().mean() > 0.2  # of the 2 that lie between two such numbers


_NO_BF16 = pytest.mark.skipif(INTERPRETED, reason="NumPy, by which kernels are interpreted, has no bf16")


@pytest.mark.parametrize(
    ("arch", "ways"), [((32, 32), {"evaluate", "score", "value", "learn"}), ((32, 16), {"loss", "step"})]
)
@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("precision", ["tf32", pytest.param("bf16", marks=_NO_BF16)])
def test_kernels_are_taken_up_where_they_prove_right(
    precision: str, overlap: str, arch: tuple[int, int], ways: set[str]
) -> None:
    algo, rollout = to_prove({"precision": precision, "overlap": overlap, "net_arch": arch})
    before, plain = algo.parameters.flat.detach().clone(), algo.ways
    pytest.importorskip("triton")
    algo._take_up_kernels(rollout)
    changed = {name for name, now, then in zip(plain._fields, algo.ways, plain) if now is not then and now != then}
    assert changed == {"shuffle", "gae", *ways}
    assert torch.equal(algo.parameters.flat, before)
    assert not algo.sums.any()


def to_prove(changes: dict[str, Any], network: NetworkFactory | None = None) -> tuple[PPO, Rollout]:
    """An algorithm and a rollout to try its kernels on; rewards are large, as some are."""
    algo = an_algo(ACTIONS["both"], {"n_envs": 20, "n_steps": 15, "batch_size": 60, **changes}, network=network)
    algo._fall_back = lambda name, error, to: pytest.fail(f"{name} {to}: {error}")
    rollout = a_rollout(a_batch(algo.policy, ActionLayout.of(ACTIONS["both"]), weighted=False, masked=False))
    rollout.rewards *= 100
    return algo, rollout


def _spoil(results: list[torch.Tensor], at: int, by: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    results[at] = by(results[at])
    return results


WRONG: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {  # place in what the loss's kernels give
    "terms": (1, lambda means: means * torch.tensor([1, 1, 0.5, 1, 1], device=DEVICE)),
    "logits' slopes": (2, torch.neg),
    "means' slopes": (3, torch.zeros_like),
    "deviations' slopes": (4, lambda slopes: 1.1 * slopes),
    "values' slopes": (5, lambda slopes: 0.5 * slopes),
}


@pytest.mark.parametrize("what", [*WRONG, "step", "advantages"])
def test_a_wrong_kernel_is_told_of_and_takes_no_others_with_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from unidle.algos import ppo_kernels

    algo, rollout = to_prove({"net_arch": (32, 16)})
    told: list[str] = []
    algo._fall_back = lambda name, error, to: told.append(str(error))
    if what == "advantages":
        gae = ppo_kernels.fused_gae
        monkeypatch.setattr(ppo_kernels, "fused_gae", lambda *of: [1.1 * part for part in gae(*of)])
    elif what == "step":
        step = ppo_kernels.FusedStep.__call__
        monkeypatch.setattr(ppo_kernels.FusedStep, "__call__", lambda self, logged: step(self, 2 * logged))
    else:
        launch = ppo_kernels.FusedLoss.launch
        monkeypatch.setattr(ppo_kernels.FusedLoss, "launch", lambda *of: _spoil(launch(*of), *WRONG[what]))
    plain = algo.ways
    algo._take_up_kernels(rollout)
    assert told == [f"the kernel's {what} differ from the reference's"]
    assert (algo.ways.gae == plain.gae) == (what == "advantages")
    assert (algo.ways.loss == plain.loss) == (what != "advantages")


def test_a_network_that_draws_and_counts_is_proven_too_and_is_then_as_before() -> None:
    pytest.importorskip("triton")

    def network(observations: spaces.Space, actions: spaces.Space) -> torch.nn.Module:
        frozen = torch.nn.Linear(5, 8).requires_grad_(False)
        return torch.nn.Sequential(frozen, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))

    algo, rollout = to_prove({}, network)
    algo.policy.train()
    kept = [*algo.policy.parameters(), *algo.policy.buffers()]
    before, drawn = [tensor.detach().clone() for tensor in kept], random_states()
    algo._take_up_kernels(rollout)
    assert algo.ways.loss != algo.loss_of
    for parameter in algo.policy.parameters():
        if parameter.requires_grad:
            algo.parameters.grad_of(parameter).zero_()
    assert not algo.parameters.grad.any()  # nothing was written between them
    assert all(torch.equal(now, then) for now, then in zip(kept, before))
    assert all(torch.equal(now, then) for now, then in zip(random_states(), drawn))


def random_states() -> list[torch.Tensor]:
    """Of the generators that layers draw from."""
    return [torch.get_rng_state(), *([] if INTERPRETED else [torch.cuda.get_rng_state()])]
