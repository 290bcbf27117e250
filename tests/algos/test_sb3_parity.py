"""SAC, TD3 and DQN updates match Stable-Baselines3's over many updates, given the same weights, batches and noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ensemble_members import member_network
from off_policy_runs import filled_dqn, filled_sac, filled_td3
from small_envs import Drift
from small_runs import SmallRun, floats
from torch import Tensor, nn
from torch.testing import assert_close

from unidle.buffers.replay import Transitions

sb3 = pytest.importorskip("stable_baselines3")

GAMMA, RATE = 0.9, 1e-3
UPDATES = 30
EPS = 1e-3  # Adam's epsilon: with a smaller one, a gradient of pure rounding error becomes a full step


def linears(*modules: nn.Module) -> list[nn.Linear]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]


class FixedBatchBuffer:
    """A replay buffer for Stable-Baselines3 that always samples the batch it was given."""

    def __init__(self, n_inputs: int) -> None:
        self._n_inputs = n_inputs
        self.batch: Any = None

    def set_batch(self, batch: Transitions) -> None:
        from stable_baselines3.common.type_aliases import ReplayBufferSamples

        obs, next_obs = (floats(part, self._n_inputs) for part in (batch.obs, batch.next_obs))
        dones = (batch.discounts == 0).float().unsqueeze(1)
        self.batch = ReplayBufferSamples(obs, batch.actions, next_obs, dones, batch.returns.unsqueeze(1))

    def sample(self, size: int, env: object = None) -> Any:
        assert size == len(self.batch.rewards)
        return self.batch


def sb3_model(
    run: SmallRun, algorithm: Any, policy_kwargs: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, FixedBatchBuffer]:
    """A Stable-Baselines3 model with this run's sizes and settings, but its own weights, and its replay buffer."""
    recipe = run.algo.recipe
    model = algorithm(
        "MlpPolicy",
        run.maker(),
        learning_rate=RATE,
        gamma=GAMMA,
        policy_kwargs={
            "net_arch": list(recipe.net_arch),
            "optimizer_class": {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[recipe.optimizer],
            "optimizer_kwargs": {"eps": EPS},
            **(policy_kwargs or {}),
        },
        device="cpu",
        **settings,
    )
    model._logger = sb3.common.logger.Logger(None, [])
    model.replay_buffer = FixedBatchBuffer(run.policy.encoder.n_features)
    return model, model.replay_buffer


def sample_batch(run: SmallRun, number: int) -> tuple[Transitions, torch.Generator]:
    """The batch that our update `number` samples, and its generator, which then draws the noise."""
    generator = torch.Generator().manual_seed(number)
    return run.algo.experience.sampler.sample(run.algo.recipe.batch_size, generator), generator


def copy_weights(ours: list[nn.Linear], theirs: list[nn.Linear]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        other.load_state_dict(mine.state_dict())


def assert_equal_weights(ours: list[nn.Linear], theirs: list[nn.Linear]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine.weight, other.weight, atol=2e-6, rtol=1e-5)
        assert_close(mine.bias, other.bias, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [10.0, 0.05], ids=["unclipped", "clipped"])
def test_dqn_matches_stable_baselines3(max_grad_norm: float) -> None:
    run = filled_dqn(
        "CartPole-v1", gamma=GAMMA, learning_rate=RATE, adam_eps=EPS, double_dqn=False, max_grad_norm=max_grad_norm
    )
    algo = run.algo
    model, buffer = sb3_model(run, sb3.DQN, max_grad_norm=max_grad_norm)
    ours, targets = (linears(policy.trunk, policy.head) for policy in (run.policy, algo.rule.target))
    theirs, their_targets = linears(model.q_net), linears(model.q_net_target)
    copy_weights(ours, theirs)
    copy_weights(targets, their_targets)
    first = algo.parameters.flat.detach().clone()
    for number in range(UPDATES):
        batch, _ = sample_batch(run, number)
        buffer.set_batch(batch)
        model.train(1, algo.recipe.batch_size)
        sb3.common.utils.polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), algo.recipe.tau)
        algo.update(torch.Generator().manual_seed(number))
        assert_equal_weights(ours, theirs)
        assert_equal_weights(targets, their_targets)
    assert (algo.parameters.flat - first).abs().max() > 5 * RATE


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The values that torch's normal distribution returns next, in this order."""
    queue: list[Tensor] = []

    def draw(shape: Any, *_: object, **__: object) -> Tensor:
        assert queue[0].shape == tuple(shape)
        return queue.pop(0)

    monkeypatch.setattr("torch.distributions.normal._standard_normal", draw)
    yield queue
    assert not queue


@pytest.mark.parametrize(
    ("ent_coef", "optimizer"),
    [("auto", "adam"), (0.2, "adam"), ("auto", "rmsprop")],
    ids=["learned", "fixed", "learned, rmsprop"],
)
def test_sac_matches_stable_baselines3(ent_coef: Any, optimizer: str, noise: list[Tensor]) -> None:
    options: dict[str, Any] = {"ent_coef": ent_coef, "optimizer": optimizer}
    run = filled_sac(Drift, gamma=GAMMA, learning_rate=RATE, adam_eps=EPS, **options)
    algo, reals = run.algo, run.policy.distribution.reals
    model, buffer = sb3_model(run, sb3.SAC, ent_coef=ent_coef, tau=algo.recipe.tau)
    model.actor.action_dist.epsilon = 0.0  # Stable-Baselines3 adds it inside log(1 − a²); our formula does without
    if ent_coef == "auto":
        model.ent_coef_optimizer.param_groups[0]["eps"] = EPS
    theirs = linears(model.actor.latent_pi)
    copy_weights(linears(run.policy.actor_trunk), theirs)
    heads = model.actor.mu, model.actor.log_std
    with torch.no_grad():
        for name in ("weight", "bias"):
            for head, part in zip(heads, getattr(run.policy.actor_head, name).split(reals), strict=True):
                getattr(head, name).copy_(part)
        networks = [(algo.rule.critics, model.critic), (algo.rule.targets, model.critic_target)]
        for ours, others in networks:
            for member, other in enumerate(others.q_networks):
                copy_weights(linears(member_network(ours.ensemble, member, nn.ReLU).float()), linears(other))
    first = algo.parameters.flat.detach().clone()
    for number in range(UPDATES):
        batch, generator = sample_batch(run, number)
        next_noise, noise_now = torch.randn(2, len(batch.obs), reals, generator=generator)
        noise += [noise_now, next_noise]  # the order in which Stable-Baselines3 draws them
        buffer.set_batch(batch)
        model.train(1, algo.recipe.batch_size)
        algo.update(torch.Generator().manual_seed(number))
        assert_equal_weights(linears(run.policy.actor_trunk), theirs)
        for name in ("weight", "bias"):
            mine, other = getattr(run.policy.actor_head, name), [getattr(head, name) for head in heads]
            assert_close(mine, torch.cat(other), atol=2e-6, rtol=1e-5)
        for ours, others in networks:
            for member, network in enumerate(others.q_networks):
                plain = linears(member_network(ours.ensemble, member, nn.ReLU).float())
                assert_equal_weights(plain, linears(network))
        if ent_coef == "auto":
            assert_close(algo.rule.log_alpha[0], model.log_ent_coef, atol=2e-6, rtol=1e-5)
    assert (algo.parameters.flat - first).abs().max() > 5 * RATE


@pytest.mark.parametrize("use_expln", [False, True], ids=["exp", "expln"])
def test_sac_with_state_dependent_exploration_matches_stable_baselines3(
    use_expln: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stable-Baselines3 gets our noise: it would draw one matrix for the whole batch, and we draw each action's."""
    run = filled_sac(
        Drift, gamma=GAMMA, learning_rate=RATE, adam_eps=EPS, use_sde=True, use_expln=use_expln, log_std_init=-0.5
    )
    algo, reals = run.algo, run.policy.distribution.reals
    kwargs = {"log_std_init": -0.5, "use_expln": use_expln}
    model, buffer = sb3_model(run, sb3.SAC, kwargs, tau=algo.recipe.tau, use_sde=True)
    dist = model.actor.action_dist
    dist.bijector.epsilon = 0.0  # it is added inside log(1 − a²); our formula does without
    queue: list[Tensor] = []
    monkeypatch.setattr(dist, "get_noise", lambda latent: dist.distribution.scale * queue.pop(0))
    model.ent_coef_optimizer.param_groups[0]["eps"] = EPS
    pairs = [(linears(run.policy.actor_trunk), linears(model.actor.latent_pi))]
    pairs += [(linears(run.policy.actor_head), linears(model.actor.mu))]
    networks = [(algo.rule.critics, model.critic), (algo.rule.targets, model.critic_target)]
    with torch.no_grad():
        for mine, theirs in pairs:
            copy_weights(mine, theirs)
        for ours, others in networks:
            for member, other in enumerate(others.q_networks):
                copy_weights(linears(member_network(ours.ensemble, member, nn.ReLU).float()), linears(other))
    first = run.policy.log_std.detach().clone()
    for number in range(UPDATES):
        batch, generator = sample_batch(run, number)
        next_noise, noise_now = torch.randn(2, len(batch.obs), reals, generator=generator)
        queue += [noise_now, next_noise]  # the order in which Stable-Baselines3 draws them
        buffer.set_batch(batch)
        model.train(1, algo.recipe.batch_size)
        algo.update(torch.Generator().manual_seed(number))
        for mine, theirs in pairs:
            assert_equal_weights(mine, theirs)
        assert_close(run.policy.log_std.view(-1, reals), model.actor.log_std, atol=2e-6, rtol=1e-5)
        for ours, others in networks:
            for member, network in enumerate(others.q_networks):
                plain = linears(member_network(ours.ensemble, member, nn.ReLU).float())
                assert_equal_weights(plain, linears(network))
    assert (run.policy.log_std - first).abs().max() > 5 * RATE


@pytest.mark.parametrize("delay", [1, 2])
def test_td3_matches_stable_baselines3(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = filled_td3(Drift, gamma=GAMMA, learning_rate=RATE, adam_eps=EPS, policy_delay=delay)
    algo, rule, reals = run.algo, run.algo.rule, run.policy.distribution.reals
    model, buffer = sb3_model(run, sb3.TD3, tau=algo.recipe.tau, policy_delay=delay)
    actors = [(rule.policy, model.actor), (rule.target_policy, model.actor_target)]
    critics = [(rule.critics, model.critic), (rule.target_critics, model.critic_target)]
    for ours, others in actors:
        copy_weights(linears(ours.actor_trunk, ours.actor_head), linears(others.mu))
    for ours, others in critics:
        for member, other in enumerate(others.q_networks):
            copy_weights(linears(member_network(ours.ensemble, member, nn.ReLU).float()), linears(other))
    first = algo.parameters.flat.detach().clone()
    for number in range(UPDATES):
        batch, generator = sample_batch(run, number)
        noise = torch.randn(len(batch.obs), reals, generator=generator)
        monkeypatch.setattr(Tensor, "normal_", lambda self, mean, std, noise=noise: self.copy_(mean + std * noise))
        buffer.set_batch(batch)
        model.train(1, algo.recipe.batch_size)
        monkeypatch.undo()
        algo.update(torch.Generator().manual_seed(number), number % delay)
        for ours, others in actors:
            assert_equal_weights(linears(ours.actor_trunk, ours.actor_head), linears(others.mu))
        for ours, others in critics:
            for member, network in enumerate(others.q_networks):
                assert_equal_weights(linears(member_network(ours.ensemble, member, nn.ReLU).float()), linears(network))
    assert (algo.parameters.flat - first).abs().max() > 5 * RATE
