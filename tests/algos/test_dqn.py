"""DQN's update against a simple reference: float64, one transition and one head at a time, torch's Adam."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from off_policy_runs import filled_dqn, keep_autograd, learn_from, off_policy_run
from small_envs import MaskedMultiDiscrete
from small_runs import SmallRun, floats
from torch import Tensor, nn
from torch.testing import assert_close

from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Transitions


class ThreeHeads(gymnasium.Env):
    """Three heads of different sizes without masks; episodes terminate or truncate at random."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.MultiDiscrete([2, 4, 3])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        end = self.np_random.random()
        observation = self.np_random.normal(size=3).astype(np.float32)
        return observation, float(action.sum()), bool(end < 0.1), bool(end > 0.9), {}


ENVS: dict[str, Any] = {
    "Discrete": "CartPole-v1",
    "MultiDiscrete": ThreeHeads,
    "MultiDiscrete, masked": MaskedMultiDiscrete,
}


class ReferenceQNetwork(nn.Module):
    """A plain float64 network: latent → advantages and, if dueling, a state value, for each head."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(_float64_copy(layer) for layer in policy.trunk))
        self.head = _float64_copy(policy.head)
        self.value_head = _float64_copy(policy.value_head) if policy.value_head is not None else None
        self.nvec = policy.distribution.nvec

    def forward(self, observation: Tensor) -> list[Tensor]:
        """[categories] of each head, for one observation."""
        latent = self.trunk(observation)
        heads = list(self.head(latent).split(self.nvec))
        if self.value_head is not None:
            heads = [value + a - a.mean() for value, a in zip(self.value_head(latent), heads)]
        return heads


def _float64_copy(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return type(layer)()
    copied = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
    copied.load_state_dict(layer.state_dict())
    return copied


class ReferenceDQN:
    """Deep Q-learning as in the papers."""

    def __init__(self, run: SmallRun) -> None:
        self.recipe, self.obs = run.algo.recipe, run.policy.obs_layout
        self.n_inputs = run.policy.encoder.n_features
        self.values, self.target = ReferenceQNetwork(run.policy), ReferenceQNetwork(run.algo.rule.target)
        self.adam = torch.optim.Adam(self.values.parameters(), lr=self.recipe.learning_rate, eps=1e-8)
        self.updates = 0

    def decode(self, packed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The numbers of a packed observation, and the allowed actions of each head."""
        start, width = self.obs.mask_offset, self.obs.mask_width
        allowed = packed[start : start + width].bool() if width else torch.ones(sum(self.values.nvec), dtype=torch.bool)
        return floats(packed, self.n_inputs).double(), list(allowed.split(self.values.nvec))

    @torch.no_grad()
    def next_value(self, packed: Tensor) -> float:
        """Mean over heads of max Q'; in double DQN, of Q' at the action that Q prefers."""
        observation, allowed = self.decode(packed)
        values = []
        for online, target, head_allowed in zip(self.values(observation), self.target(observation), allowed):
            ranking = online if self.recipe.double_dqn else target
            action = max((i for i in range(len(head_allowed)) if head_allowed[i]), key=lambda i: float(ranking[i]))
            values.append(float(target[action]))
        return sum(values) / len(values)

    def update(self, batch: Transitions) -> Tensor:
        """Learns from a batch; returns each transition's |δ|, averaged over heads."""
        losses, errors, chosen = [], [], []
        for i, packed in enumerate(batch.obs):
            target = float(batch.returns[i])
            if batch.discounts[i] > 0:
                target += float(batch.discounts[i]) * self.next_value(batch.next_obs[i])
            heads = self.values(self.decode(packed)[0])
            q = torch.stack([head[int(action)] for head, action in zip(heads, batch.actions[i])])
            huber = nn.functional.huber_loss(q, torch.full_like(q, target), delta=1.0, reduction="mean")
            losses.append(float(batch.weights[i]) * huber)
            errors.append((q.detach() - target).abs().mean())
            chosen.append(q.detach().mean())
        self.adam.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.values.parameters(), self.recipe.max_grad_norm)
        self.metrics = {"loss": loss.item(), "value": torch.stack(chosen).mean().item(), "grad_norm": norm.item()}
        self.adam.step()
        self.updates += 1
        if self.updates % self.recipe.target_update_interval == 0:
            for target_weight, weight in zip(self.target.parameters(), self.values.parameters()):
                target_weight.data.mul_(1 - self.recipe.tau).add_(self.recipe.tau * weight.data)
        return torch.stack(errors)


def assert_same(run: SmallRun, reference: ReferenceDQN) -> None:
    for policy, network in ((run.policy, reference.values), (run.algo.rule.target, reference.target)):
        for mine, others in zip(ReferenceQNetwork(policy).parameters(), network.parameters(), strict=True):
            assert_close(mine, others, atol=1e-5, rtol=1e-5)


def assert_updates_agree(run: SmallRun, updates: int = 5) -> None:
    reference, buffer = ReferenceDQN(run), run.algo.experience.sampler
    for number in range(updates):
        batch = buffer.sample(run.algo.recipe.batch_size, torch.Generator().manual_seed(number))
        run.algo.rule.sums.zero_()
        run.algo.update(torch.Generator().manual_seed(number))
        errors = reference.update(batch)
        assert_same(run, reference)
        names = ("loss", "value", "grad_norm")
        assert run.algo.rule.sums.tolist() == pytest.approx(
            [reference.metrics[name] for name in names], rel=1e-4, abs=1e-5
        )
        if isinstance(buffer, Prioritised):
            for cell in batch.index.unique():
                priority = (float(errors[batch.index == cell].max()) + 1e-6) ** run.algo.recipe.per_alpha
                assert float(buffer.tree.leaves[cell]) == pytest.approx(priority, rel=1e-3)


@pytest.mark.parametrize("gradients", ["numpy", "autograd"])
@pytest.mark.parametrize("space", ENVS)
@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
def test_updates_match_reference(space: str, double: bool, dueling: bool, gradients: str) -> None:
    run = filled_dqn(ENVS[space], double_dqn=double, dueling=dueling)
    if gradients == "autograd":
        keep_autograd(run)
    assert_updates_agree(run)
    assert not run.algo._dispatch.fallbacks


@pytest.mark.parametrize("space", ENVS)
def test_20_updates_with_all_options_match_reference(space: str) -> None:
    options = {"per": True, "n_step": 2, "max_grad_norm": 0.05, "target_update_interval": 2}
    assert_updates_agree(filled_dqn(ENVS[space], double_dqn=True, dueling=True, **options), 20)


@pytest.mark.parametrize("space", ENVS)
@pytest.mark.parametrize(
    "recipe",
    [
        {"target_update_interval": 2, "tau": 1.0},
        {"target_update_interval": 3, "tau": 0.5},
        {"max_grad_norm": 0.02},
        {"max_grad_norm": math.inf},
        {"n_step": 3},
        {"per": True},
        {"per": True, "dueling": True, "n_step": 2, "max_grad_norm": 0.05, "target_update_interval": 2},
        {"net_arch": ()},
        {"gamma": 0.0},
    ],
    ids=str,
)
def test_updates_match_reference_for_each_setting(space: str, recipe: dict[str, Any]) -> None:
    run = filled_dqn(ENVS[space], **recipe)
    if recipe.get("per"):  # priorities that differ
        buffer = run.algo.experience.sampler
        acted = buffer.replay.has_transition.nonzero()[:, 0]
        buffer.update(acted, torch.linspace(0.1, 3.0, len(acted)))
        assert buffer.sample(16, torch.Generator().manual_seed(0)).weights.unique().numel() > 4
    assert_updates_agree(run)


def test_huber_loss_clips_gradient_at_one() -> None:
    """With all values at 0, the gradient of a value is its error, clipped to 1, over heads and batch size."""
    run = filled_dqn(ThreeHeads, gamma=0.0, max_grad_norm=math.inf, net_arch=(), batch_size=64)
    with torch.no_grad():
        run.policy.head.weight.zero_()
        run.policy.head.bias.zero_()
    batch = run.algo.experience.sampler.sample(64, torch.Generator().manual_seed(0))
    run.algo.update(torch.Generator().manual_seed(0))
    expected = torch.zeros(9)
    for action, reward in zip(batch.actions, batch.returns):
        for head, start in enumerate((0, 2, 6)):
            expected[start + int(action[head])] -= min(1.0, float(reward)) / 3 / 64
    assert batch.returns.max() > 2  # so some errors are clipped
    assert_close(run.algo.parameters._grads[-1], expected)  # the gradient of the bias


def test_target_network_moves_only_every_target_update_interval() -> None:
    run = filled_dqn("CartPole-v1", target_update_interval=4, tau=1.0)
    target = run.algo.rule.target_parameters.flat
    for update in range(1, 13):
        before = target.detach().clone()
        run.algo.update(torch.Generator().manual_seed(update))
        if update % 4 == 0:
            assert torch.equal(target, run.algo.parameters.flat)
        else:
            assert torch.equal(target, before)


def test_terminated_transition_ignores_its_next_observation() -> None:
    run = filled_dqn("CartPole-v1")
    replay = run.algo.experience.sampler
    ended = replay.terminated.nonzero()[:, 0]
    assert len(ended)
    before = replay.gather(ended)
    replay.obs[replay.after(ended)] = 0x7F  # read as floats: 3e38
    after = replay.gather(ended)
    assert not torch.equal(before.next_obs, after.next_obs)
    with torch.no_grad():
        target = after.returns + after.discounts * run.algo.rule._next_value(after.next_obs).nan_to_num()
    assert torch.equal(target, before.returns)


@pytest.mark.parametrize(
    ("progress", "epsilon"), [(0.0, 1.0), (0.1, 0.76), (0.2, 0.52), (0.4, 0.04), (0.7, 0.04), (1.0, 0.04)]
)
def test_epsilon_decays_linearly_to_final_value(progress: float, epsilon: float) -> None:
    run = off_policy_run("CartPole-v1", "dqn", learning_starts=32, exploration_final_eps=0.04, exploration_fraction=0.4)
    run.collect()
    metrics = learn_from(run.algo, run.rollout, run.shuffle(), progress)
    assert float(metrics["epsilon"]) == pytest.approx(epsilon)
    assert float(run.policy.distribution.epsilon) == pytest.approx(epsilon)


def test_epsilon_is_one_until_learning_starts() -> None:
    run = off_policy_run("CartPole-v1", "dqn", learning_starts=33, exploration_final_eps=0.04, exploration_fraction=0.0)
    assert run.policy.distribution.epsilon == 1.0
    run.collect()
    learn_from(run.algo, run.rollout, run.shuffle(), 0.5)
    assert run.policy.distribution.epsilon == 1.0
    run.collector.open_rollout()
    run.collect()
    learn_from(run.algo, run.rollout, run.shuffle(), 0.5)
    assert float(run.policy.distribution.epsilon) == pytest.approx(0.04)


def test_linear_schedule_ends_at_zero_learning_rate() -> None:
    run = filled_dqn("CartPole-v1", lr_schedule="linear")
    run.algo.set_progress(0.25)
    assert run.algo.rule.learning_rate.item() == pytest.approx(0.75e-3)
    run.algo.set_progress(1.0)
    before = run.algo.parameters.flat.detach().clone()
    run.algo.update(torch.Generator().manual_seed(0))
    assert torch.equal(run.algo.parameters.flat.detach(), before)
