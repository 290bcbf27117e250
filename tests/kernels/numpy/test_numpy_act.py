"""Inference in NumPy against inference in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from ppo_minibatches import ACTIONS

from unidle.algos.capturing import no_capture
from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.envs.shared_block import SharedBlock
from unidle.kernels.numpy.act import NumpyActor
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

STEPS, N_ENVS = 5, 40


def make_slot(
    name: str, changes: dict[str, Any], *, masked: bool, own_weights: bool
) -> tuple[RolloutSlot, SharedBlock]:
    """A rollout slot whose environments have sent observations, and their shared block."""
    actions = ActionLayout.of(ACTIONS[name])
    obs = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (5,)), actions.mask_width if masked else 0)
    recipe = recipe_for(**{"net_arch": (32, 24), "n_envs": N_ENVS, "normalize_obs": True, **changes})
    torch.manual_seed(1)
    policy = ActorCritic(obs, actions, recipe)
    with torch.no_grad():
        policy.actor_head.weight.mul_(50)  # so that actions depend on observations
        if policy.encoder.norm is not None:
            policy.encoder.norm.shift.normal_()
            policy.encoder.norm.scale.uniform_(0.5, 20)
    env_spec: Any = SimpleNamespace(obs_layout=obs, action_layout=actions, log_info=())
    block = SharedBlock(env_spec, N_ENVS)
    rng = np.random.default_rng(2)
    block.obs.view(np.float32)[:, :5] = rng.standard_normal((N_ENVS, 5))
    if masked:
        mask = obs.mask_view(block.obs)
        mask[:] = rng.random(mask.shape) < 0.5
        mask[:, [int(sum(actions.nvec[:head])) for head in range(actions.heads)]] = 1
    rollout = Rollout(STEPS, N_ENVS, obs.obs_bytes, actions.width, policy.state_size, torch.device("cpu"))
    state = torch.zeros(N_ENVS, policy.state_size)
    slot = RolloutSlot(policy, rollout, block, state, no_capture, own_weights=own_weights)
    slot.open(1, 7, 3)
    return slot, block


def outputs_of(slot: RolloutSlot, block: SharedBlock) -> list[np.ndarray]:
    """What inference writes: for some environments at different steps, then for all at one step."""
    ready = np.arange(0, N_ENVS, 3)
    slot.inference.act((ready % (STEPS - 1), ready), None)
    first = block.actions.copy()
    slot.inference.act((STEPS - 1, slice(0, N_ENVS)), None)
    return [first, block.actions.copy(), slot.rollout.actions.numpy(), slot.rollout.obs.numpy()[:STEPS]]


@pytest.mark.parametrize("own_weights", [False, True], ids=["shared weights", "copied weights"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("name", "masked"), [*((name, False) for name in ACTIONS), ("multi-discrete", True), ("mixed", True)]
)
def test_actions_and_stored_tensors_match_torch(name: str, masked: bool, activation: str, own_weights: bool) -> None:
    slots = [make_slot(name, {"activation": activation}, masked=masked, own_weights=own_weights) for _ in range(2)]
    assert slots[0][0].inference._numpy_actor is not None
    slots[1][0].inference._numpy_actor, slots[1][0].inference._is_verified = None, True
    first, all_actions, actions, obs = outputs_of(*slots[0])
    expected = outputs_of(*slots[1])
    for ours, theirs in zip((first, all_actions, actions, obs), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    waiting = np.arange(N_ENVS) % 3 != 0
    assert not first[waiting].any()  # environments that are not ready may still be reading their last action
    assert len(np.unique(all_actions)) > 1
    assert obs[STEPS - 1].any()


def test_inference_uses_current_weights() -> None:
    slot, block = make_slot("box", {}, masked=False, own_weights=False)
    before = outputs_of(slot, block)[2].copy()
    with torch.no_grad():
        slot.policy.actor_head.bias.add_(0.1)
    np.testing.assert_allclose(outputs_of(slot, block)[2][-1], before[-1] + 0.1, atol=1e-5)


@pytest.mark.parametrize("changes", [{"activation": "elu"}, {"recurrent": "gru"}, {"net_arch": (8192, 4)}])
def test_unsupported_and_large_networks_use_torch(changes: dict[str, Any]) -> None:
    slot, _ = make_slot("mixed", changes, masked=False, own_weights=False)
    assert slot.inference._numpy_actor is None


def test_nan_observation_gives_nan_action_in_its_environment_only() -> None:
    slot, block = make_slot("box", {}, masked=False, own_weights=False)
    block.obs.view(np.float32)[4] = np.nan
    slot.inference.act((0, slice(0, N_ENVS)), None)
    assert np.isnan(block.actions[4]).all()
    assert not np.isnan(np.delete(block.actions, 4, 0)).any()
    assert isinstance(slot.inference._numpy_actor, NumpyActor)
