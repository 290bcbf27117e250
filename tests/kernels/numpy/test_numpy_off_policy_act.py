"""Inference with the policies of off-policy algorithms in NumPy against inference in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.algos.capturing import no_capture
from unidle.algos.registry import new_policy
from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.envs.shared_block import SharedBlock
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

STEPS, N_ENVS = 3, 50
BOX, DISCRETE, MULTI = spaces.Box(-2.0, 5.0, (3,)), spaces.Discrete(4), spaces.MultiDiscrete([2, 4, 3])
CASES: dict[str, tuple[str, spaces.Space, bool, dict[str, Any]]] = {
    "SAC": ("sac", BOX, False, {}),
    "SAC with categories": ("sac", DISCRETE, False, {}),
    "SAC with a mask": ("sac", DISCRETE, True, {}),
    "TD3": ("td3", BOX, False, {"exploration_noise": 0.5}),
    "DQN": ("dqn", DISCRETE, False, {}),
    "DQN with a mask": ("dqn", MULTI, True, {}),
    "dueling DQN": ("dqn", MULTI, False, {"dueling": True}),
}


def make_slot(case: str, random: float) -> tuple[RolloutSlot, SharedBlock]:
    """A rollout slot whose environments have sent observations, and their shared block."""
    algo, space, masked, changes = CASES[case]
    actions = ActionLayout.of(space)
    obs = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (5,)), actions.mask_width if masked else 0)
    torch.manual_seed(1)
    policy: Any = new_policy(obs, actions, recipe_for(algo, net_arch=(32, 24), n_envs=N_ENVS, **changes))
    (policy.distribution.epsilon if algo == "dqn" else policy.distribution.at_random).fill_(random)
    env_spec: Any = SimpleNamespace(obs_layout=obs, action_layout=actions, log_info=())
    block = SharedBlock(env_spec, N_ENVS)
    rng = np.random.default_rng(2)
    block.obs.view(np.float32)[:, :5] = 3 * rng.standard_normal((N_ENVS, 5))
    if masked:
        mask = obs.mask_view(block.obs)
        mask[:] = rng.random(mask.shape) < 0.5
        mask[:, [int(sum(actions.nvec[:head])) for head in range(actions.heads)]] = 1
    rollout = Rollout(STEPS, N_ENVS, obs.obs_bytes, actions.width, 0, torch.device("cpu"))
    slot = RolloutSlot(policy, rollout, block, torch.zeros(N_ENVS, 0), no_capture, own_weights=False)
    slot.open(1, 7, 3)
    return slot, block


@pytest.mark.parametrize("random", [0.0, 0.4, 1.0], ids=["policy", "partly random", "random"])
@pytest.mark.parametrize("case", CASES)
def test_actions_match_torch(case: str, random: float) -> None:
    results = []
    for in_numpy in (True, False):
        slot, block = make_slot(case, random)
        assert slot.inference._numpy_actor is not None
        if not in_numpy:
            slot.inference._numpy_actor, slot.inference._is_verified = None, True
        ready = np.arange(0, N_ENVS, 3)
        slot.inference.act((ready % (STEPS - 1), ready), None)
        first = block.actions.copy()
        slot.inference.act((STEPS - 1, slice(0, N_ENVS)), None)
        results.append([first, block.actions.copy(), slot.rollout.actions.numpy(), slot.rollout.obs.numpy()[:STEPS]])
        assert (slot.inference._numpy_actor is not None) == in_numpy
        assert not slot.inference.dispatch.fallbacks
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(np.unique(results[0][1])) > 1
