"""The actor kernel against the policy's own inference, in Triton's interpreter or on a GPU.

The interpreter runs blocks one after another, so there is only one: several would wait for each other forever.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.buffers.rollout import Rollout
from unidle.config.settings import PPORecipe, SACRecipe
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

STEPS = 3


@pytest.fixture(autouse=True)
def libdevice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces libdevice, which the interpreter lacks, by functions of the Triton language."""
    pytest.importorskip("triton")
    if INTERPRETED:
        import triton.language as tl

        from unidle.kernels.triton import act

        replacement = SimpleNamespace(tanh=lambda z: 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0), erf=lambda z: tl.erf(z))
        monkeypatch.setattr(act, "libdevice", replacement)


def assert_matches_policy(policy: Any, n_envs: int, actions: ActionLayout) -> None:
    """Every other environment is ready, each at its own step."""
    from unidle.kernels.triton.act import ActorMlp, ActTensors, FusedActor, max_blocks
    from unidle.nn.describe import actor_tensors, describe_actor

    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if policy.encoder.norm is not None:
            policy.encoder.norm.shift.normal_()
            policy.encoder.norm.scale.uniform_(0.5, 20)  # some observations are clipped
    policy = policy.to(DEVICE)
    FlatParameters(policy)
    rollout = Rollout(STEPS, n_envs, policy.obs_layout.obs_bytes, actions.width, 0, DEVICE)
    pin = (lambda tensor: tensor) if INTERPRETED else torch.Tensor.pin_memory
    obs = torch.zeros(n_envs, policy.obs_layout.obs_bytes, dtype=torch.uint8)
    obs.view(torch.float32)[:, : policy.encoder.n_numbers].normal_()
    obs = pin(obs)
    positions = pin(torch.where(torch.arange(n_envs) % 2 == 0, torch.arange(n_envs) % STEPS, STEPS))
    env_actions = pin(torch.full((n_envs, actions.width), 7.0))
    noise = torch.randn(STEPS + 1, n_envs, actions.width).to(DEVICE)
    mlp = describe_actor(policy)
    assert isinstance(mlp, ActorMlp)
    assert mlp.unsupported(n_envs) is None
    tensors = ActTensors(
        obs=obs,
        positions=positions,
        env_actions=env_actions,
        rollout_obs=rollout.obs,
        rollout_actions=rollout.actions_and_trash,
        noise=noise,
        **actor_tensors(policy),
    )
    actor = FusedActor(mlp, tensors, 1 if INTERPRETED else max_blocks(DEVICE))
    at = positions.to(DEVICE), torch.arange(n_envs, device=DEVICE)
    for _ in range(2):  # the second call finds the counter as the first one did
        actor()
        with torch.inference_mode():
            params, _ = policy.act(obs.to(DEVICE), None)
            expected = policy.distribution.sample(params, noise[at])
            scaled = policy.distribution.to_env(expected).cpu()
        if not INTERPRETED:
            torch.cuda.synchronize()
        ready = positions < STEPS
        torch.testing.assert_close(rollout.actions_and_trash[at], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(env_actions[ready], scaled[ready], rtol=1e-4, atol=1e-4)
        assert (env_actions[~ready] == 7.0).all()
        assert torch.equal(rollout.obs[at].cpu(), obs)
    written = torch.zeros(STEPS + 1, n_envs, dtype=torch.bool)
    written[positions, torch.arange(n_envs)] = True
    assert not rollout.actions_and_trash.cpu()[~written].any()


def layouts(n_numbers: int, n_actions: int) -> tuple[ObservationLayout, ActionLayout]:
    obs = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (n_numbers,)), 0)
    return obs, ActionLayout.of(spaces.Box(-2, 3, (n_actions,)))


@pytest.mark.parametrize(
    ("activation", "arch", "n_envs", "normalize_obs", "n_actions"),
    [("tanh", (16, 16), 1, False, 1), ("relu", (24,), 7, True, 3), ("tanh", (20, 9, 33), 17, True, 5)],
)
def test_gaussian_actions_match_the_policy(
    activation: Any, arch: tuple[int, ...], n_envs: int, normalize_obs: bool, n_actions: int
) -> None:
    torch.manual_seed(1)
    obs, actions = layouts(5, n_actions)
    recipe = PPORecipe(n_envs=n_envs, net_arch=arch, activation=activation, normalize_obs=normalize_obs)
    assert_matches_policy(ActorCritic(obs, actions, recipe), n_envs, actions)


@pytest.mark.parametrize("at_random", [False, True], ids=["policy", "random"])
@pytest.mark.parametrize(("n_tasks", "n_envs"), [(1, 3), (3, 11)])
def test_squashed_actions_match_the_policy_with_task_heads(n_tasks: int, n_envs: int, at_random: bool) -> None:
    torch.manual_seed(1)
    obs, actions = layouts(7, 2)
    recipe = SACRecipe(n_envs=n_envs, net_arch=(20, 12), activation="relu", n_tasks=n_tasks)
    policy = SACPolicy(obs, actions, recipe)
    policy.distribution.at_random.fill_(float(at_random))
    assert_matches_policy(policy, n_envs, actions)


def test_unsupported_actor_gives_a_reason() -> None:
    from unidle.kernels.triton.act import ActorMlp
    from unidle.nn.describe import describe_actor

    obs, actions = layouts(5, 2)
    recurrent = ActorCritic(obs, actions, PPORecipe(n_envs=4, recurrent="gru", recurrent_size=4))
    assert describe_actor(recurrent) == "the policy is recurrent or in bfloat16"
    policy = ActorCritic(obs, actions, PPORecipe(n_envs=4, activation="gelu"))
    FlatParameters(policy)
    description = describe_actor(policy)
    assert isinstance(description, ActorMlp)
    assert description.unsupported(4) == "activation gelu: the kernel takes tanh and relu"
    assert "2000 environments" in str(description.unsupported(2000))
