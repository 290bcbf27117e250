"""The gradient by one kernel against autograd's, on a GPU or (TRITON_INTERPRET=1) step by step on the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.algos.ppo import PPO, Batch
from unidle.config import Recipe
from unidle.nn.policy import Policy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import RowLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

SAMPLES, BATCH = 320, 208  # a minibatch that is no multiple of what a block takes at a time
ACTIONS: dict[str, spaces.Space] = {
    "one choice": spaces.Discrete(2),
    "many choices": spaces.Discrete(13),
    "heads": spaces.MultiDiscrete([3, 2, 5]),
    "reals": spaces.Box(-1, 1, (6,)),
    "both": spaces.Dict(turn=spaces.MultiDiscrete([2, 4]), push=spaces.Box(-1, 1, (3,))),
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu, 16 units": {"activation": "relu", "network_arch": (16, 16)},
    "64 units, entropy": {"network_arch": (64, 64), "ent_coef": 0.1},
    "values clipped": {"clip_range_vf": 0.2, "vf_coef": 0.7},
    "advantages as they are": {"normalize_advantage": False},
    "observations normalised": {"normalize_obs": True},
}


def a_batch(policy: Policy, actions: ActionLayout, *, weighted: bool, masked: bool) -> Batch:
    """Experience that a slightly different policy might have had: some ratios are clipped, some are not."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = torch.zeros(SAMPLES, 1, policy.rows.row_bytes, dtype=torch.uint8)
    numbers = policy.encoder.n_numbers
    rows[:, 0, : 4 * numbers] = (1.5 * normal(SAMPLES, numbers)).view(torch.uint8)
    allowed = torch.ones(SAMPLES, policy.distribution.n_logits, dtype=torch.uint8)
    heads = []
    for start, n in zip(np.cumsum([0, *actions.nvec]), actions.nvec):
        if masked:
            allowed[:, start : start + n] = (torch.rand(SAMPLES, n, generator=generator) < 0.6).to(torch.uint8)
            allowed[:, start + torch.randint(n, (), generator=generator)] = 1
        heads.append(torch.multinomial(allowed[:, start : start + n].float(), 1, generator=generator).float())
    if masked:
        at = policy.rows.mask_offset
        rows[:, 0, at : at + policy.rows.mask_width] = allowed
    flat = torch.cat([*heads, normal(SAMPLES, actions.reals)], 1).unsqueeze(1).to(DEVICE)
    rows = rows.to(DEVICE)
    with torch.no_grad():
        params, values = policy(rows)
        log_probs, _ = policy.distribution.score(params, flat)
    weights = torch.rand(SAMPLES, 1, generator=generator).to(DEVICE) if weighted else None
    return Batch(
        rows,
        flat,
        log_probs + 0.3 * normal(SAMPLES, 1).to(DEVICE),
        values + 0.3 * normal(SAMPLES, 1).to(DEVICE),
        (3 + 2 * normal(SAMPLES, 1)).to(DEVICE),
        normal(SAMPLES, 1).to(DEVICE),
        None,
        None,
        weights,
    )


def both_gradients(
    action_space: spaces.Space, changes: dict[str, Any], *, weighted: bool = False, masked: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient, what is logged) by autograd and by the kernel."""
    pytest.importorskip("triton")
    from unidle.algos.fused_minibatch import FusedMinibatch

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(1)
    actions = ActionLayout.of(action_space)
    rows = RowLayout.of(spaces.Box(-np.inf, np.inf, (5,)), actions.mask_width if masked else 0)
    recipe = Recipe(**{"network_arch": (32, 32), "n_envs": SAMPLES, "n_steps": 1, "batch_size": BATCH, **changes})
    policy = Policy(rows, actions, recipe)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy = policy.to(DEVICE)
    algo = PPO(policy, recipe)
    if policy.encoder.norm is not None:
        policy.encoder.norm.update(1 + 3 * torch.randn(100, 5, device=DEVICE))
    batch = a_batch(policy, actions, weighted=weighted, masked=masked)
    order = torch.randperm(SAMPLES, device=DEVICE)[:BATCH]
    fused = FusedMinibatch.of(policy, algo.parameters, recipe, algo.clip_range)
    assert fused is not None
    found = []
    for compute in (algo.gradient, fused.gradient):
        algo.parameters.grad.fill_(7.0)
        logged = compute(batch, order)
        found.append((algo.parameters.grad.clone(), logged))
    return found


def assert_close(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    (expected, logged), (gradient, also_logged) = found
    assert expected.norm() > 0
    used = expected != 7.0  # autograd leaves the padding between parameters alone
    error = (gradient - expected)[used].norm() / expected[used].norm()
    assert error < 2e-5
    torch.testing.assert_close(also_logged, logged, rtol=1e-4, atol=1e-5)


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
