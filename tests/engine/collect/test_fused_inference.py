"""The fused inference kernel gives the same results as the plain kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe, Recipe, SACRecipe
from unidle.engine.collect.inference import Inference, PageLock
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.cuda_graphs import Capture
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.shared_block import SharedBlock
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.sac_policy import SACPolicy

pytestmark = pytest.mark.gpu
STEPS = 5


def run_inference(
    recipe: Recipe, env: str, fused: bool, monkeypatch: pytest.MonkeyPatch, *, use_random_actions: bool = False
) -> tuple[dict[str, torch.Tensor], bool]:
    """Actions and observations after two inferences, and whether the fused kernel was used."""
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("highest")
    env_spec = probe(env_maker(env), None, 0)
    torch.manual_seed(1)
    kind = SACPolicy if recipe.algo == "sac" else ActorCritic
    policy = kind(env_spec.obs_layout, env_spec.action_layout, recipe).to(device)
    if use_random_actions:
        policy.distribution.at_random.fill_(1.0)
    with torch.no_grad():
        policy.actor_head.weight.mul_(5 if recipe.algo == "sac" else 50)  # so that actions depend on observations
        if policy.encoder.norm is not None:
            policy.encoder.norm.shift.normal_()
            policy.encoder.norm.scale.uniform_(0.5, 20)
    FlatParameters(policy)
    rollout = Rollout(STEPS, recipe.n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0, device)
    block = SharedBlock(env_spec, recipe.n_envs)
    obs = block.obs.view(np.float32)
    obs[:] = np.random.default_rng(2).standard_normal(obs.shape)
    lock = PageLock(block)
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(Inference, "_new_fused_actor", lambda self: "disabled")
        state = torch.zeros(recipe.n_envs, 0, device=device)
        slot = RolloutSlot(policy, rollout, block, state, Capture(device, print), own_weights=True)
        slot.open(1, 7, 3)
        ready = np.arange(0, recipe.n_envs, 2)
        for step in range(2):  # the second one replays the graph
            slot.inference.act((np.full(len(ready), step), ready), None)
    torch.cuda.synchronize()
    is_fused = "Inference" not in slot.inference.dispatch.fallbacks
    results = {
        "env actions": torch.from_numpy(block.actions[ready].copy()),
        "env actions of idle envs": torch.from_numpy(block.actions[1::2].copy()),
        "actions": rollout.actions[:2, ready].cpu(),
        "actions of idle envs": rollout.actions[:, 1::2].cpu(),
        "obs": rollout.obs[:2, ready].cpu(),
        "later actions": rollout.actions[2:].cpu(),
    }
    lock.close()
    return results, is_fused


@pytest.mark.parametrize(
    ("activation", "arch", "n_envs", "normalize_obs"),
    [
        ("tanh", (64, 64), 1, False),
        ("relu", (48,), 16, True),
        ("tanh", (200, 96, 33), 50, True),
        ("relu", (64, 64), 100, False),
        ("tanh", (1024, 512), 300, True),
    ],
)
def test_fused_kernel_matches_plain_kernels_and_writes_only_ready_envs(
    activation: str, arch: tuple[int, ...], n_envs: int, normalize_obs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PPORecipe(n_envs=n_envs, net_arch=arch, activation=activation, normalize_obs=normalize_obs)  # type: ignore[arg-type]
    fused, is_fused = run_inference(recipe, "Pendulum-v1", True, monkeypatch)
    plain, _ = run_inference(recipe, "Pendulum-v1", False, monkeypatch)
    assert is_fused
    for name in ("env actions", "actions"):
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-4, atol=1e-4)
    assert torch.equal(fused["obs"], plain["obs"])
    assert fused["obs"].any()
    for name in ("actions of idle envs", "env actions of idle envs", "later actions"):
        assert not fused[name].any()


@pytest.mark.parametrize("use_random_actions", [False, True], ids=["policy", "random"])
@pytest.mark.parametrize(("n_tasks", "arch", "n_envs"), [(1, (64, 64), 10), (2, (400, 400, 400), 48), (2, (33,), 300)])
def test_fused_squashed_actions_match_plain_kernels_for_each_task(
    n_tasks: int, arch: tuple[int, ...], n_envs: int, use_random_actions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = SACRecipe(n_envs=n_envs, net_arch=arch, activation="relu", n_tasks=n_tasks)
    fused, is_fused = run_inference(recipe, "Pendulum-v1", True, monkeypatch, use_random_actions=use_random_actions)
    plain, _ = run_inference(recipe, "Pendulum-v1", False, monkeypatch, use_random_actions=use_random_actions)
    assert is_fused
    for name in ("env actions", "actions"):
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-4, atol=1e-4)
    assert float(plain["actions"].std()) > 0.1
    assert torch.equal(fused["obs"], plain["obs"])
    for name in ("actions of idle envs", "env actions of idle envs", "later actions"):
        assert not fused[name].any()


def test_unsupported_policies_use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for env, recipe in (("CartPole-v1", PPORecipe(n_envs=4)), ("Pendulum-v1", PPORecipe(n_envs=4, activation="gelu"))):
        _, is_fused = run_inference(recipe, env, True, monkeypatch)
        assert not is_fused


def test_failing_fused_kernel_falls_back_to_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unidle.kernels.triton.act import FusedActor

    def broken(self: FusedActor) -> None:
        raise RuntimeError("no such GPU")

    recipe = PPORecipe(n_envs=10)
    plain, _ = run_inference(recipe, "Pendulum-v1", False, monkeypatch)
    monkeypatch.setattr(FusedActor, "__call__", broken)
    fallback, is_fused = run_inference(recipe, "Pendulum-v1", True, monkeypatch)
    assert not is_fused
    for name, expected in plain.items():
        assert torch.equal(fallback[name], expected), name
    assert plain["env actions"].any()
    assert not plain["env actions of idle envs"].any()


def test_wrong_fused_kernel_falls_back_to_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unidle.kernels.triton.act import FusedActor

    original = FusedActor.__call__

    def wrong(self: FusedActor) -> None:
        original(self)
        self._arguments[2].mul_(1.5)  # the environments' actions

    recipe = PPORecipe(n_envs=10)
    plain, _ = run_inference(recipe, "Pendulum-v1", False, monkeypatch)
    monkeypatch.setattr(FusedActor, "__call__", wrong)
    fallback, is_fused = run_inference(recipe, "Pendulum-v1", True, monkeypatch)
    assert not is_fused
    for name, expected in plain.items():
        assert torch.equal(fallback[name], expected), name
