"""SAC's Triton kernels against the PyTorch reference, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from unidle.algos.micro_batches import MicroBatches
from unidle.algos.off_policy import Gradient
from unidle.algos.sac import SAC
from unidle.algos.sac_kernels import choose_sac_update, unsupported
from unidle.buffers.replay import Transitions
from unidle.config import SACRecipe
from unidle.kernels.dispatch import Dispatch, no_report
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

BATCH = 40  # not a multiple of a block size
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh, other widths": {"activation": "tanh", "net_arch": (24,), "critic_arch": (40, 17)},
    "three critics, clipped": {"n_critics": 3, "max_grad_norm": 0.05},
    "not clipped": {"max_grad_norm": 1e9},
    "other betas": {"adam_betas": (0.5, 0.9)},
    "tasks": {"n_tasks": 3, "weight_init": "he"},
    "value limit": {"value_limit": 0.1},
    "fixed temperature": {"ent_coef": 0.3},
    "given target entropy, one critic": {"target_entropy": -1.5, "n_critics": 1},
}


def make_sac(reals: int, **changes: Any) -> SAC:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"activation": "relu", "net_arch": (32, 32), "critic_arch": (48, 32)} | changes
    recipe = SACRecipe(n_envs=6, n_steps=1, batch_size=BATCH, buffer_size=1200, **settings)
    obs = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (9,)))
    policy = SACPolicy(obs, ActionLayout.of(spaces.Box(-1, 1, (reals,))), recipe).to(DEVICE)
    return SAC(policy, recipe, Gradient(MicroBatches("A minibatch", no_report)))


def make_batch(algo: SAC) -> tuple[Transitions, torch.Tensor]:
    """Some transitions are terminal, weights differ and one is 0; every task occurs."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    obs, next_obs = (torch.zeros(BATCH, algo.policy.obs_layout.obs_bytes // 4) for _ in range(2))
    n_tasks = algo.recipe.n_tasks
    for seen in (obs, next_obs):
        seen[:, :9] = normal(BATCH, 9)
        if n_tasks > 1:
            seen[:, 9 - n_tasks : 9] = torch.nn.functional.one_hot(torch.arange(BATCH) % n_tasks, n_tasks).float()
    reals = algo.policy.distribution.reals
    weights = torch.rand(BATCH, generator=generator)
    weights[5] = 0.0
    discounts = 0.99 * (torch.rand(BATCH, generator=generator) < 0.8).float()
    fields = (
        obs.view(torch.uint8),
        torch.tanh(normal(BATCH, reals)),
        normal(BATCH),
        discounts,
        next_obs.view(torch.uint8),
        torch.arange(BATCH),
        weights,
    )
    noise = normal(2, BATCH, reals)
    noise[1, 3] = 30.0  # an outlier: its log-probability must not become log 0
    return Transitions(*(field.to(DEVICE) for field in fields)), noise.to(DEVICE)


@pytest.mark.parametrize("reals", [1, 4])
@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES.keys())
def test_update_matches_reference(changes: dict[str, Any], reals: int) -> None:
    from unidle.algos.sac_kernels import FusedUpdate

    torch.set_float32_matmul_precision("highest")
    plain, fused = (make_sac(reals, **changes) for _ in range(2))
    batch, noise = make_batch(plain)
    learn = FusedUpdate(fused)
    initial = [tensor.clone() for tensor in plain.changes]
    for _ in range(2):  # so that Adam's moments, temperature and targets matter too
        errors = plain.update(batch, noise)
        torch.testing.assert_close(learn(batch, noise), errors, rtol=2e-4, atol=2e-5)
    assert float(plain.alpha_grad.abs().sum()) > 0 or "ent_coef" in changes
    for mine, theirs, before in zip(fused.changes, plain.changes, initial):
        # Relative to the whole change: Adam moves a weight by the learning rate even if its gradient is rounding error.
        assert float((mine - theirs).norm()) <= 0.02 * float((theirs - before).norm()) + 1e-6
    for name in ("parameters", "critic_parameters"):
        mine, theirs = getattr(fused, name).grad, getattr(plain, name).grad
        mine = mine * min(1.0, plain.recipe.max_grad_norm / float(torch.linalg.vector_norm(mine)))
        assert float(torch.linalg.vector_norm(mine - theirs)) <= 5e-3 * float(torch.linalg.vector_norm(theirs))


@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES.keys())
def test_verification_accepts_kernels_and_restores_state(changes: dict[str, Any]) -> None:
    algo = make_sac(2, **changes)
    batch, noise = make_batch(algo)
    algo.update(batch, noise)
    before = [tensor.clone() for tensor in (*algo.changes, algo.learning_rate)]
    dispatch = Dispatch()
    assert choose_sac_update(dispatch, algo, batch, noise) != algo.update
    assert not dispatch.fallbacks
    assert all(torch.equal(a, b) for a, b in zip((*algo.changes, algo.learning_rate), before))


@pytest.mark.parametrize("wrong", ["_critic_loss", "_actor_loss", "_actor_gradient", "_sample_actions"])
def test_wrong_kernel_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from unidle.kernels.triton import sac_update

    algo = make_sac(2)
    batch, noise = make_batch(algo)
    original = sac_update.SacUpdate._run

    def skip(self: Any, kernel: Any, *tensors: Any, **kwargs: Any) -> None:
        if kernel is not getattr(sac_update, wrong):
            original(self, kernel, *tensors, **kwargs)

    monkeypatch.setattr(sac_update.SacUpdate, "_run", skip)
    reported: list[str] = []
    dispatch = Dispatch(lambda operation, error, instead: reported.append(f"{operation} {instead}"))
    assert choose_sac_update(dispatch, algo, batch, noise) == algo.update
    assert "differ from the reference's" in dispatch.fallbacks["The SAC update"]
    assert reported == ["The SAC update uses the plain PyTorch implementation"]


@pytest.mark.parametrize("space", [spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3))], ids=["dict"])
def test_unsupported_networks_keep_the_reference(space: spaces.Space) -> None:
    recipe = SACRecipe(n_envs=2, n_steps=1, batch_size=8, buffer_size=100, activation="relu")
    policy = SACPolicy(ObservationLayout.of(space), ActionLayout.of(spaces.Box(-1, 1, (2,))), recipe).to(DEVICE)
    assert (
        unsupported(SAC(policy, recipe, Gradient(MicroBatches("A minibatch", no_report))))
        == "the observation is not one float32 vector"
    )
    assert unsupported(make_sac(2)) is None
    assert unsupported(make_sac(2, activation="elu")) == "no kernel for the activation ELU"
    assert unsupported(make_sac(2, critic_arch=())) == "the critics are linear"
    assert unsupported(make_sac(2, optimizer="sgd")) == "the optimiser is sgd: kernels take adam"
