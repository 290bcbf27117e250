"""TD3's update against a simple reference: plain networks in float64, torch's own Adam."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from ensemble_members import member_network
from off_policy_runs import filled_td3, keep_autograd, learn_from, off_policy_run
from small_envs import Drift
from small_runs import CPU, SmallRun, floats
from torch import Tensor, nn
from torch.testing import assert_close

from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Transitions
from unidle.rng import keyed_generator


class ReferenceTD3:
    """Algorithm 1 of Fujimoto et al. 2018."""

    def __init__(self, run: SmallRun) -> None:
        rule = run.algo.rule
        self.recipe, self.n_inputs = run.algo.recipe, run.policy.encoder.n_features
        self.actor, self.target_actor = (float64_actor(policy) for policy in (rule.policy, rule.target_policy))
        members = range(self.recipe.n_critics)
        self.critics, self.targets = (
            [member_network(critics.ensemble, member, nn.ReLU) for member in members]
            for critics in (rule.critics, rule.target_critics)
        )
        self.critic_weights = [weight for critic in self.critics for weight in critic.parameters()]
        rate = self.recipe.learning_rate
        self.critic_adam = torch.optim.Adam(self.critic_weights, lr=rate, eps=1e-8)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr=rate, eps=1e-8)
        self.updates = 0

    def update(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Learns from a batch; returns each transition's |δ|, averaged over critics."""
        recipe = self.recipe
        obs, next_obs = (floats(packed, self.n_inputs).double() for packed in (batch.obs, batch.next_obs))
        returns, discounts, weights = (t.double() for t in (batch.returns, batch.discounts, batch.weights))
        with torch.no_grad():
            smoothing = (noise * recipe.target_policy_noise).clip(-recipe.target_noise_clip, recipe.target_noise_clip)
            action = (self.target_actor(next_obs).tanh() + smoothing).clip(-1, 1)
            values = torch.stack([target(torch.cat([next_obs, action], -1)).squeeze(-1) for target in self.targets])
            td_target = returns + discounts * values.min(0).values
        loss, errors = torch.zeros((), dtype=torch.float64), []
        for critic in self.critics:
            q = critic(torch.cat([obs, batch.actions.double()], -1)).squeeze(-1)
            errors.append((q - td_target).detach().abs())
            loss = loss + (weights * (q - td_target) ** 2).mean()
        self._step(self.critic_adam, loss, self.critic_weights)
        self.updates += 1
        if self.updates % recipe.policy_delay == 0:
            actor_loss = -self.critics[0](torch.cat([obs, self.actor(obs).tanh()], -1)).mean()
            self._step(self.actor_adam, actor_loss, list(self.actor.parameters()))
            pairs = [(self.target_actor, self.actor), *zip(self.targets, self.critics)]
            for target_net, net in pairs:
                for target_weight, weight in zip(target_net.parameters(), net.parameters()):
                    target_weight.data.mul_(1 - recipe.tau).add_(recipe.tau * weight.data)
        return torch.stack(errors).mean(0)

    def _step(self, adam: torch.optim.Adam, loss: Tensor, weights: list[Tensor]) -> None:
        adam.zero_grad()
        for critic in self.critics:
            critic.zero_grad()
        loss.backward()
        if math.isfinite(self.recipe.max_grad_norm):
            nn.utils.clip_grad_norm_(weights, self.recipe.max_grad_norm)
        adam.step()


def float64_actor(policy: Any) -> nn.Sequential:
    """The actor's layers in float64, without the last tanh."""
    return nn.Sequential(*copy.deepcopy([*policy.actor_trunk, policy.actor_head])).double()


def assert_same(run: SmallRun, reference: ReferenceTD3) -> None:
    rule = run.algo.rule
    for policy, actor in ((rule.policy, reference.actor), (rule.target_policy, reference.target_actor)):
        for mine, others in zip(float64_actor(policy).parameters(), actor.parameters(), strict=True):
            assert_close(mine, others, atol=1e-5, rtol=1e-5)
    for critics, networks in ((rule.critics, reference.critics), (rule.target_critics, reference.targets)):
        for member, network in enumerate(networks):
            ours = member_network(critics.ensemble, member, nn.ReLU)
            for mine, others in zip(ours.parameters(), network.parameters(), strict=True):
                assert_close(mine, others, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gradients", ["numpy", "autograd"])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"policy_delay": 1},
        {"policy_delay": 3},
        {"n_critics": 1},
        {"n_critics": 3},
        {"target_policy_noise": 0.0},
        {"target_policy_noise": 2.0, "target_noise_clip": 0.3},
        {"per": True},
        {"n_step": 3},
        {"max_grad_norm": 0.05},
        {"critic_arch": (8, 12, 8)},
        {"tau": 1.0},
        {"gamma": 0.0},
    ],
    ids=str,
)
def test_updates_match_reference(recipe: dict[str, Any], gradients: str) -> None:
    run = filled_td3(Drift, **recipe)
    if gradients == "autograd":
        keep_autograd(run)
    assert_updates_agree(run, 6)
    assert not run.algo._dispatch.fallbacks


def test_20_updates_with_all_options_match_reference() -> None:
    options = {"per": True, "n_step": 3, "n_critics": 3, "critic_arch": (8, 12, 8), "max_grad_norm": 0.05}
    assert_updates_agree(filled_td3(Drift, target_policy_noise=2.0, target_noise_clip=0.3, **options), 20)


def assert_updates_agree(run: SmallRun, updates: int) -> None:
    """The same batches and the same noise for both."""
    reference, sampler = ReferenceTD3(run), run.algo.experience.sampler
    if isinstance(sampler, Prioritised):
        acted = sampler.replay.has_transition.nonzero()[:, 0]
        sampler.update(acted, torch.linspace(0.1, 3.0, len(acted)))
    for number in range(updates):
        generator = torch.Generator().manual_seed(number)
        batch = sampler.sample(run.algo.recipe.batch_size, generator)
        noise = torch.randn(run.algo.rule.noise_shape, generator=generator).double()
        errors = reference.update(batch, noise)
        run.algo.update(torch.Generator().manual_seed(number), number % run.algo.recipe.policy_delay)
        assert_same(run, reference)
        if isinstance(sampler, Prioritised):
            for cell in batch.index.unique():
                priority = (float(errors[batch.index == cell].max()) + 1e-6) ** run.algo.recipe.per_alpha
                assert float(sampler.tree.leaves[cell]) == pytest.approx(priority, rel=1e-3)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_actor_and_targets_update_only_every_policy_delay(delay: int) -> None:
    run = off_policy_run(Drift, "td3", policy_delay=delay, utd_ratio=1 / 32, n_steps=16, learning_starts=32)
    run.collect()
    learn_from(run.algo, run.rollout, run.shuffle())  # warm-up
    rule, moved = run.algo.rule, []
    for _ in range(7):  # one update per rollout
        run.collector.open_rollout()
        run.collect()
        before = [flat.clone() for flat in rule.changes[:4]]  # actor, critics, target actor, target critics
        learn_from(run.algo, run.rollout, run.shuffle())
        moved.append([not torch.equal(new, old) for new, old in zip(rule.changes[:4], before)])
    assert run.algo.experience.updates == 7
    for number, (actor, critics, *targets) in enumerate(moved, 1):
        assert critics
        assert [actor, *targets] == [number % delay == 0] * 3


def test_target_noise_and_target_action_are_clipped() -> None:
    run = filled_td3(Drift, target_policy_noise=0.2, target_noise_clip=0.5)
    rule, seen = run.algo.rule, []
    critics = rule.target_critics.forward
    rule.target_critics.forward = lambda obs, actions: seen.append(actions) or critics(obs, actions)  # type: ignore[func-returns-value]
    obs = run.rollout.obs[0]
    action = rule.target_policy.actions(obs)
    reals = action.shape[1]
    for noise, shift in ((100.0, 0.5), (-100.0, -0.5), (1.0, 0.2)):
        rule._next_value(obs, torch.full((len(obs), reals), noise))
        assert_close(seen[-1], (action + shift).clamp(-1, 1))
    with torch.no_grad():
        rule.target_policy.actor_head.bias.fill_(50.0)  # tanh gives 1
    rule._next_value(obs, torch.full((len(obs), reals), 100.0))
    assert seen[-1].max() == 1.0


def test_exploration_is_uniform_during_warm_up_and_gaussian_after() -> None:
    run = off_policy_run(Drift, "td3", exploration_noise=0.1)
    distribution = run.policy.distribution
    params, _ = run.policy.act(run.rollout.obs[0][:1].expand(20_000, -1))
    noise = distribution.noise((20_000,), torch.Generator().manual_seed(0))
    assert distribution.at_random == 1.0
    uniform = distribution.sample(params, noise)
    assert uniform.abs().mean().item() == pytest.approx(0.5, abs=0.02)
    distribution.at_random.zero_()
    action = distribution.sample(params, noise)
    assert (action - params.mean).std().item() == pytest.approx(0.1, rel=0.02)
    assert torch.equal(distribution.mode(params), params.mean)
    assert distribution.sample(params, 1e3 * noise).abs().max() == 1.0


def test_logged_losses_are_means_over_the_updates_that_computed_them() -> None:
    run = off_policy_run(Drift, "td3", utd_ratio=3 / 32, learning_starts=32)
    run.collect()
    learn_from(run.algo, run.rollout, run.shuffle())
    run.collector.open_rollout()
    run.collect()
    rule, actor_losses, critic_losses = run.algo.rule, [], []
    actor_gradient, critic_gradient = rule.actor_gradient, rule.critic_gradient

    def record(losses: list[float], result: Any) -> Any:
        losses.append(float(result[0][0]))
        return result

    keep_autograd(run)
    rule.actor_gradient = lambda *batch: record(actor_losses, actor_gradient(*batch))
    rule.critic_gradient = lambda *batch: record(critic_losses, critic_gradient(*batch))
    metrics = learn_from(run.algo, run.rollout, run.shuffle())
    assert (len(critic_losses), len(actor_losses)) == (3, 1)
    assert float(metrics["critic_loss"]) == pytest.approx(sum(critic_losses) / 3)
    assert float(metrics["actor_loss"]) == pytest.approx(actor_losses[0])


def test_checkpoint_between_actor_updates_continues_bit_for_bit() -> None:
    uninterrupted = off_policy_run(Drift, "td3", per=True, utd_ratio=3 / 32)
    rollout = uninterrupted.collect()
    for number in range(4):
        if number:
            uninterrupted.collector.open_rollout()
            uninterrupted.collect()
        if number == 2:
            assert uninterrupted.algo.experience.updates % 2 == 1
            file = io.BytesIO()
            torch.save(uninterrupted.algo.state_dict(), file)
            file.seek(0)
            resumed = off_policy_run(Drift, "td3", seed=1, per=True, utd_ratio=3 / 32)
            resumed.algo.load_state_dict(torch.load(file, weights_only=True))
        if number >= 2:
            learn_from(resumed.algo, rollout, keyed_generator(CPU, number), number / 4)
        learn_from(uninterrupted.algo, rollout, keyed_generator(CPU, number), number / 4)
    for mine, others in zip(resumed.algo.rule.changes, uninterrupted.algo.rule.changes, strict=True):
        assert torch.equal(mine, others)
