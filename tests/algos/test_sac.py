"""SAC's update against a simple reference: plain networks in float64, torch's own Adam."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ensemble_members import member_network
from gymnasium import spaces
from off_policy_runs import filled_sac, keep_autograd, learn_from, off_policy_run
from small_envs import Drift
from small_runs import SmallRun, floats
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions.transforms import TanhTransform
from torch.testing import assert_close
from toy_envs import Masked

from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Transitions

ENVS: dict[str, Any] = {"Box": Drift, "Discrete": "CartPole-v1"}


class ReferenceSAC:
    """Soft actor-critic as in the papers."""

    def __init__(self, run: SmallRun) -> None:
        algo = run.algo
        self.recipe = algo.recipe
        self.n_inputs = run.policy.encoder.n_features
        self.reals, self.categories = run.policy.distribution.reals, run.policy.distribution.n_logits
        self.actor = nn.Sequential(
            *(_float64_copy(layer) for layer in (*run.policy.actor_trunk, run.policy.actor_head))
        )
        members, activation = range(self.recipe.n_critics), type(algo.rule.critics.ensemble.activation)
        self.critics = [member_network(algo.rule.critics.ensemble, member, activation) for member in members]
        self.targets = [member_network(algo.rule.targets.ensemble, member, activation) for member in members]
        first = 0.0 if self.recipe.ent_coef == "auto" else math.log(self.recipe.ent_coef)
        self.log_temperature = torch.tensor(first, dtype=torch.float64, requires_grad=True)
        rate = self.recipe.learning_rate
        self.critic_weights = [weight for critic in self.critics for weight in critic.parameters()]
        self.adams = [
            torch.optim.Adam(weights, lr=rate, eps=1e-8)
            for weights in (self.critic_weights, self.actor.parameters(), [self.log_temperature])
        ]
        self.target_entropy = -self.reals if self.reals else 0.98 * math.log(self.categories)
        if self.recipe.target_entropy is not None:
            self.target_entropy = self.recipe.target_entropy

    def decode(self, obs: Tensor) -> Tensor:
        return floats(obs, self.n_inputs).double()

    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """An action and its log-probability, from torch.distributions."""
        mean, log_std = self.actor(observation).split(self.reals, -1)
        normal, squash = Normal(mean, log_std.clamp(-20, 2).exp()), TanhTransform()
        before = normal.mean + normal.stddev * noise
        action = squash(before)
        return action, (normal.log_prob(before) - squash.log_abs_det_jacobian(before, action)).sum(-1)

    def clip_values(self, values: Tensor) -> Tensor:
        limit = self.recipe.value_limit
        return values if limit is None else values.clip(-limit, limit)

    def min_q(self, critics: list[nn.Sequential], observation: Tensor, action: Tensor | None) -> Tensor:
        inputs = observation if action is None else torch.cat([observation, action], -1)
        return torch.stack([critic(inputs) for critic in critics]).min(0).values

    def update(self, batch: Transitions, noise: list[Tensor]) -> Tensor:
        """Learns from a batch; returns each transition's |δ|, averaged over critics."""
        recipe = self.recipe
        obs, next_obs = self.decode(batch.obs), self.decode(batch.next_obs)
        returns, discounts, weights = (t.double() for t in (batch.returns, batch.discounts, batch.weights))
        alpha = self.log_temperature.detach().exp()
        with torch.no_grad():
            if self.reals:
                action, log_prob = self.act(next_obs, noise[0])
                value = self.min_q(self.targets, next_obs, action).squeeze(-1) - alpha * log_prob
            else:
                log_probs = torch.log_softmax(self.actor(next_obs), -1)
                value = (log_probs.exp() * (self.min_q(self.targets, next_obs, None) - alpha * log_probs)).sum(-1)
            target = self.clip_values(returns + discounts * value)
        loss, values, errors = torch.zeros((), dtype=torch.float64), [], []
        for critic in self.critics:
            if self.reals:
                q = critic(torch.cat([obs, batch.actions.double()], -1)).squeeze(-1)
            else:
                q = critic(obs)[torch.arange(len(obs)), batch.actions[:, 0].long()]
            q = self.clip_values(q)
            values.append(q.detach())
            errors.append((q - target).detach().abs())
            loss = loss + 0.5 * (weights * (q - target) ** 2).mean()
        self._step(0, loss, self.critic_weights)
        self.metrics = {"critic_loss": loss.item(), "value": torch.stack(values).mean().item()}
        if self.reals:
            action, log_prob = self.act(obs, noise[1])
            loss = (alpha * log_prob - self.min_q(self.critics, obs, action).squeeze(-1)).mean()
        else:
            log_probs = torch.log_softmax(self.actor(obs), -1)
            q = self.min_q(self.critics, obs, None).detach()
            loss = (log_probs.exp() * (alpha * log_probs - q)).sum(-1).mean()
            log_prob = (log_probs.exp() * log_probs).sum(-1)
        self._step(1, loss, list(self.actor.parameters()))
        self.metrics |= {"actor_loss": loss.item(), "entropy": -log_prob.mean().item()}
        if recipe.ent_coef == "auto":
            self._step(2, -(self.log_temperature * (log_prob.detach() + self.target_entropy)).mean(), [])
        for target_net, critic in zip(self.targets, self.critics):
            for target_weight, weight in zip(target_net.parameters(), critic.parameters()):
                target_weight.data.mul_(1 - recipe.tau).add_(recipe.tau * weight.data)
        return torch.stack(errors).mean(0)

    def _step(self, which: int, loss: Tensor, weights: list[Tensor]) -> None:
        self.adams[which].zero_grad()
        for critic in self.critics:
            critic.zero_grad()
        loss.backward()
        if weights and math.isfinite(self.recipe.max_grad_norm):
            nn.utils.clip_grad_norm_(weights, self.recipe.max_grad_norm)
        self.adams[which].step()


def _float64_copy(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return type(layer)()
    copied = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
    copied.load_state_dict(layer.state_dict())
    return copied


def begin_learning(run: SmallRun) -> None:
    """Lets learning start with the next rollout."""
    run.algo.experience._first_step = run.algo.experience.steps


def assert_same(run: SmallRun, reference: ReferenceSAC) -> None:
    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
    linears = [layer for layer in (*run.policy.actor_trunk, run.policy.actor_head) if isinstance(layer, nn.Linear)]
    for mine, others in zip(linears, (layer for layer in reference.actor if isinstance(layer, nn.Linear)), strict=True):
        assert_close(mine.weight.double(), others.weight, **close)
        assert_close(mine.bias.double(), others.bias, **close)
    for ensemble, networks in (
        (run.algo.rule.critics.ensemble, reference.critics),
        (run.algo.rule.targets.ensemble, reference.targets),
    ):
        for member, network in enumerate(networks):
            for mine, others in zip(
                member_network(ensemble, member, nn.ReLU).parameters(), network.parameters(), strict=True
            ):
                assert_close(mine, others, **close)
    assert_close(run.algo.rule.log_alpha[0, 0].double(), reference.log_temperature, **close)


def assert_updates_agree(run: SmallRun, updates: int) -> ReferenceSAC:
    """The same batches and the same noise for both."""
    reference, buffer = ReferenceSAC(run), run.algo.experience.sampler
    for number in range(updates):
        generator = torch.Generator().manual_seed(number)
        batch = buffer.sample(run.algo.recipe.batch_size, generator)
        noise = [torch.randn(len(batch.obs), reference.reals, generator=generator).double() for _ in range(2)]
        errors = reference.update(batch, noise)
        run.algo.update(torch.Generator().manual_seed(number))
        assert_same(run, reference)
        if isinstance(buffer, Prioritised):
            for cell in batch.index.unique():
                largest = float(errors[batch.index == cell].max())
                priority = (largest + 1e-6) ** run.algo.recipe.per_alpha
                assert float(buffer.tree.leaves[cell]) == pytest.approx(priority, rel=1e-3)
    return reference


@pytest.mark.parametrize("gradients", ["numpy", "autograd"])
@pytest.mark.parametrize("space", ENVS)
@pytest.mark.parametrize("n_critics", [1, 2, 5])
@pytest.mark.parametrize("ent_coef", ["auto", 0.2])
def test_updates_match_reference(space: str, n_critics: int, ent_coef: Any, gradients: str) -> None:
    run = filled_sac(ENVS[space], n_critics=n_critics, ent_coef=ent_coef)
    if gradients == "autograd":
        keep_autograd(run)
    reference = assert_updates_agree(run, 5)
    moved = reference.log_temperature.item() != (0.0 if ent_coef == "auto" else math.log(0.2))
    assert moved == (ent_coef == "auto")


@pytest.mark.parametrize("space", ENVS)
@pytest.mark.parametrize(
    "recipe",
    [
        {"per": True},
        {"max_grad_norm": 0.05},
        {"max_grad_norm": 1e6},
        {"n_step": 3},
        {"per": True, "max_grad_norm": 0.05, "n_critics": 3, "n_step": 2},
        {"target_entropy": 0.3},
        {"value_limit": 0.2},
        {"critic_arch": (8, 12, 8)},
        {"critic_arch": (), "net_arch": ()},
        {"tau": 1.0},
        {"gamma": 0.0},
    ],
    ids=str,
)
def test_updates_match_reference_for_each_setting(space: str, recipe: dict[str, Any]) -> None:
    run = filled_sac(ENVS[space], **recipe)
    if recipe.get("per"):  # priorities that differ
        buffer = run.algo.experience.sampler
        acted = buffer.replay.has_transition.nonzero()[:, 0]
        buffer.update(acted, torch.linspace(0.1, 3.0, len(acted)))
        assert buffer.sample(16, torch.Generator().manual_seed(0)).weights.unique().numel() > 4
    assert_updates_agree(run, 5)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_20_updates_with_all_options_match_reference(activation: str) -> None:
    options = {"per": True, "max_grad_norm": 0.05, "n_critics": 3, "n_step": 2, "critic_arch": (8, 12, 8)}
    run = filled_sac(Drift, value_limit=0.3, target_entropy=0.3, activation=activation, **options)
    assert_updates_agree(run, 20)
    assert not run.algo._dispatch.fallbacks  # computed in NumPy


def test_gradient_clipping_uses_norm_over_all_critics() -> None:
    whole, clipped = filled_sac(Drift), filled_sac(Drift, max_grad_norm=0.01)
    for run in (whole, clipped):
        run.algo.update(torch.Generator().manual_seed(0))
    norms = [torch.linalg.vector_norm(run.algo.rule.critic_parameters.grad).item() for run in (whole, clipped)]
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("space", ENVS)
def test_metrics_are_means_over_updates(space: str) -> None:
    run = filled_sac(ENVS[space], utd_ratio=0.1)
    reference, buffer = ReferenceSAC(run), run.algo.experience.sampler
    run.collect()
    begin_learning(run)
    metrics = learn_from(run.algo, run.rollout, run.shuffle())
    assert metrics["updates"] == 3
    generator, expected = run.shuffle(), []
    for _ in range(3):
        batch = buffer.sample(16, generator)
        noise = [torch.randn(16, reference.reals, generator=generator).double() for _ in range(2)]
        reference.update(batch, noise)
        expected.append(reference.metrics)
    for name in reference.metrics:
        assert float(metrics[name]) == pytest.approx(
            sum(metric[name] for metric in expected) / 3, rel=1e-4, abs=1e-5
        ), name
    assert float(metrics["temperature"]) == pytest.approx(reference.log_temperature.exp().item(), rel=1e-5)


def test_temperature_rises_below_target_entropy_and_falls_above() -> None:
    for target, sign in ((50.0, 1), (-50.0, -1)):
        run = filled_sac(Drift, target_entropy=target)
        for number in range(3):
            run.algo.update(torch.Generator().manual_seed(number))
        # Each of Adam's first steps has the size of the learning rate.
        assert run.algo.rule.log_alpha.item() == pytest.approx(sign * 3e-3, rel=1e-2)


@pytest.mark.parametrize("space", ENVS)
def test_linear_schedule_ends_at_zero_learning_rate(space: str) -> None:
    run = filled_sac(ENVS[space], lr_schedule="linear")
    run.algo.set_progress(0.25)
    assert run.algo.rule.learning_rate.item() == pytest.approx(0.75e-3)
    run.algo.set_progress(1.0)
    before = run.algo.parameters.flat.detach().clone()
    run.algo.update(torch.Generator().manual_seed(0))
    assert torch.equal(run.algo.parameters.flat.detach(), before)


def test_masked_actions_get_no_probability_and_losses_stay_finite() -> None:
    """The environment allows one action at a time and raises on any other."""
    run = off_policy_run(Masked, "sac", learning_starts=32, max_grad_norm=math.inf)
    for _ in range(4):
        run.collect()
        metrics = learn_from(run.algo, run.rollout, run.shuffle())
        assert all(math.isfinite(value) for value in metrics.values())
        run.collector.open_rollout()
    assert run.algo.experience.updates == 96
    params, _ = run.policy.act(run.rollout.obs[0])
    assert run.policy.distribution.log_probs(params.logits).exp().max(-1).values.tolist() == [[1.0], [1.0]]


def test_learning_equals_single_updates_from_one_generator() -> None:
    one, other = (filled_sac(Drift, utd_ratio=0.25) for _ in range(2))
    for run in (one, other):
        run.collect()
        begin_learning(run)
    metrics = learn_from(one.algo, one.rollout, one.shuffle())
    assert metrics["updates"] == 8
    other.algo.experience.store(other.rollout)
    generator = other.shuffle()
    for _ in range(8):
        other.algo.update(generator)
    assert torch.equal(one.algo.parameters.flat, other.algo.parameters.flat)
    assert torch.equal(one.algo.rule.target_flat, other.algo.rule.target_flat)


class HalfAllowed(gymnasium.Env):
    """Only the first two of four actions are allowed, and the first is better."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._outcome()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, info = self._outcome()
        return observation, float(action == 0), False, bool(self.np_random.random() < 0.1), info

    def _outcome(self) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {"action_mask": np.array([1, 1, 0, 0], np.int8)}


def test_target_entropy_accounts_for_action_masks() -> None:
    run = off_policy_run(HalfAllowed, "sac", learning_rate=1e-2, max_grad_norm=math.inf, utd_ratio=4.0)
    for _ in range(6):
        run.collect()
        metrics = learn_from(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    assert metrics["n_updates"] == 640
    # The better action has p = σ(1 / α), since it earns 1 more; its entropy is 0.98 log 2 at α = 2.98.
    assert float(metrics["entropy"]) == pytest.approx(0.98 * math.log(2), abs=0.003)
    assert float(metrics["temperature"]) == pytest.approx(2.98, abs=0.1)
