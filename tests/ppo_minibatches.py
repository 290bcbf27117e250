"""PPO minibatches, and comparisons of gradients from several implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from unidle.algos.ppo import PPO, Batch
from unidle.algos.ppo_ops import PPOOps, new_ppo
from unidle.config import recipe_for
from unidle.nn.actor_critic import ActorCritic, NetworkFactory
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

SAMPLES, BATCH = 320, 208  # the batch size is not a multiple of a kernel's block size
ACTIONS: dict[str, spaces.Space] = {
    "binary": spaces.Discrete(2),
    "discrete": spaces.Discrete(13),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 5]),
    "box": spaces.Box(-1, 1, (6,)),
    "mixed": spaces.Dict(turn=spaces.MultiDiscrete([2, 4]), push=spaces.Box(-1, 1, (3,))),
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu, 16 units": {"activation": "relu", "net_arch": (16, 16)},
    "64 units, entropy": {"net_arch": (64, 64), "ent_coef": 0.1},
    "clip_range_vf": {"clip_range_vf": 0.2, "vf_coef": 0.7},
    "advantages not normalised": {"normalize_advantage": False},
    "observations normalised": {"normalize_obs": True},
}
UPDATE_SETTINGS: dict[str, dict[str, Any]] = {
    "small clipping norm": {"max_grad_norm": 0.01},
    "large steps": {"max_grad_norm": 100.0, "learning_rate": 0.01},
    "stopped by target_kl": {"max_grad_norm": 100.0, "learning_rate": 0.02, "target_kl": 0.1},
}


def make_batch(policy: ActorCritic, actions: ActionLayout, *, weighted: bool, masked: bool) -> Batch:
    """A minibatch with the log-probabilities of a slightly different policy, so that some ratios are clipped."""
    generator, device = torch.Generator().manual_seed(7), policy.log_std.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    obs = torch.zeros(SAMPLES, 1, policy.obs_layout.obs_bytes, dtype=torch.uint8)
    numbers = policy.encoder.n_numbers
    obs[:, 0, : 4 * numbers] = (1.5 * normal(SAMPLES, numbers)).view(torch.uint8)
    allowed = torch.ones(SAMPLES, policy.distribution.n_logits, dtype=torch.uint8)
    heads = []
    for start, n in zip(np.cumsum([0, *actions.nvec]), actions.nvec):
        if masked:
            allowed[:, start : start + n] = (torch.rand(SAMPLES, n, generator=generator) < 0.6).to(torch.uint8)
            allowed[:, start + torch.randint(n, (), generator=generator)] = 1
        heads.append(torch.multinomial(allowed[:, start : start + n].float(), 1, generator=generator).float())
    if masked:
        at = policy.obs_layout.mask_offset
        allowed[::7] = 0  # an empty mask allows all actions
        obs[:, 0, at : at + policy.obs_layout.mask_width] = allowed
    flat = torch.cat([*heads, normal(SAMPLES, actions.reals)], 1).unsqueeze(1).to(device)
    obs = obs.to(device)
    with torch.no_grad():
        params, values = policy(obs)
        log_probs, _ = policy.distribution.log_prob_and_entropy(params, flat)
    weights = torch.rand(SAMPLES, 1, generator=generator).to(device) if weighted else None
    return Batch(
        obs,
        flat,
        log_probs + 0.3 * normal(SAMPLES, 1).to(device),
        values + 0.3 * normal(SAMPLES, 1).to(device),
        (3 + 2 * normal(SAMPLES, 1)).to(device),
        normal(SAMPLES, 1).to(device),
        None,
        None,
        weights,
    )


def make_algo(
    action_space: spaces.Space,
    changes: dict[str, Any],
    *,
    masked: bool = False,
    network: NetworkFactory | None = None,
    device: torch.device,
) -> PPO:
    """A PPO whose weights differ from their initialisation."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(1)
    actions = ActionLayout.of(action_space)
    obs = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (5,)), actions.mask_width if masked else 0)
    recipe = recipe_for(**{"net_arch": (32, 32), "n_envs": SAMPLES, "n_steps": 1, "batch_size": BATCH, **changes})
    policy = ActorCritic(obs, actions, recipe, network)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    algo = new_ppo(policy.to(device), recipe)
    if policy.encoder.norm is not None:
        policy.encoder.norm.update(1 + 3 * torch.randn(100, 5, device=device))
    return algo


def ops_of(algo: PPO) -> PPOOps:
    """The operations of `algo`, which are all references at first."""
    assert isinstance(algo.ops, PPOOps)
    return algo.ops


def compute_gradient(
    algo: PPO, compute: Callable[[Batch, torch.Tensor], torch.Tensor], batch: Batch, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient and the logged values."""
    algo.parameters.grad.fill_(7.0)
    logged = compute(batch, order)
    return algo.parameters.grad.clone(), logged


def assert_close(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    (expected, logged), *others = found
    assert expected.norm() > 0
    used = expected != 7.0  # autograd does not write the padding between parameters
    for gradient, also_logged in others:
        error = (gradient - expected)[used].norm() / expected[used].norm()
        assert error < 2e-5
        torch.testing.assert_close(also_logged, logged, rtol=1e-4, atol=1e-5)


def state_after_six_updates(
    algo: PPO, make_update: Callable[[PPO], Callable[[Batch, torch.Tensor], None]]
) -> list[torch.Tensor]:
    """Parameters, optimiser state and counters of `algo`, which has mixed actions, after six minibatches."""
    batch = make_batch(algo.policy, ActionLayout.of(ACTIONS["mixed"]), weighted=False, masked=False)
    with torch.no_grad():
        params, _ = algo.policy(batch.obs)
        batch.log_probs, _ = algo.policy.distribution.log_prob_and_entropy(params, batch.actions)
    generator = torch.Generator().manual_seed(5)
    orders = torch.stack([torch.randperm(SAMPLES, generator=generator)[:BATCH] for _ in range(6)])
    make_update(algo)(batch, orders.to(algo.clip_range.device))
    state = algo.optimiser.state_dict()
    return [algo.parameters.flat.detach(), *state.values(), *vars(algo.counters).values()]
