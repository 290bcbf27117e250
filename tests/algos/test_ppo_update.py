"""PPO's update on real rollouts, against the acting policy, a simple reference and Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_envs import Drift, MaskedMultiDiscrete, short_cartpole
from small_runs import SmallRun, as_sequences, copy_of_learner, floats, record_inference, small_run
from torch import Tensor
from torch.testing import assert_close
from toy_envs import MixedDictEnv

from unidle.algos.ppo import Batch
from unidle.algos.run_to_end import run_to_end
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.kernels.dispatch import Dispatch, no_report
from unidle.kernels.numpy.ppo_minibatch import NumpyMinibatch

ENVS = ["CartPole-v1", "Pendulum-v1"]


# -- acting and learning agree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [*ENVS, "Taxi-v4", MaskedMultiDiscrete, MixedDictEnv])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_ratios_are_1_before_first_minibatch(env: Any, recurrent: str) -> None:
    run = small_run(
        env,
        n_steps=32,
        batch_size=16,
        recurrent=recurrent,
        normalize_obs=True,
        normalize_reward=True,
        learning_rate=3e-3,
    )
    inferences = record_inference(run)
    for _ in range(3):
        inferences.clear()
        run.collect()
        batch = copy_of_learner(run).prepare(run.rollout)
        acting = torch.stack([log_prob for log_prob, _ in inferences])  # [T, N]
        length = batch.obs.shape[1]
        assert length == (1 if recurrent == "none" else 16)
        assert_close(batch.log_probs, as_sequences(acting, length), atol=1e-5, rtol=0)
        assert_ratios_are_1(run, batch)
        before = run.algo.parameters.flat.detach().clone()
        run.learn()
        assert not torch.equal(before, run.algo.parameters.flat)  # the next rollout comes from other weights
        # The new weights neither acted in this rollout nor computed its recurrent states; the ratios are still 1.
        stale = copy_of_learner(run).prepare(run.rollout)
        assert not torch.equal(stale.log_probs, batch.log_probs)
        assert_ratios_are_1(run, stale)


def assert_ratios_are_1(run: SmallRun, batch: Batch) -> None:
    for index in torch.arange(len(batch.obs)).split(16 // batch.obs.shape[1]):
        part = batch.at(index)
        with torch.no_grad():
            params, values = run.policy(part.obs, part.starts, part.states)
            log_probs, _ = run.policy.distribution.log_prob_and_entropy(params, part.actions)
        assert_close((log_probs - part.log_probs).exp(), torch.ones_like(log_probs), atol=1e-5, rtol=0)
        assert_close(values, part.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("env", ENVS)
def test_single_minibatch_update_has_zero_kl_and_clip_fraction(env: str) -> None:
    run = small_run(env, batch_size=32, n_epochs=1, normalize_obs=True, normalize_reward=True, learning_rate=1e-2)
    for _ in range(3):
        run.collect()
        metrics = run.learn()
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["clip_fraction"] == 0.0
        assert metrics["updates"] == 1.0


def test_normalisation_stats_are_updated_once_per_iteration() -> None:
    run = small_run("Pendulum-v1", normalize_obs=True, normalize_reward=True)
    norm, rewards = run.policy.encoder.norm, run.algo.reward_norm
    assert norm is not None
    assert rewards is not None
    observations, returns, running = [], [], torch.zeros(2, dtype=torch.float64)
    for iteration in range(1, 4):
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        run.collect()
        for name, value in norm.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert rewards.count == 32 * (iteration - 1)
        run.learn()
        observations.append(floats(run.rollout.obs[:-1], 3).reshape(-1, 3).double())
        for reward in run.rollout.rewards:  # Pendulum episodes last 200 steps, so none ends here
            running = reward.double() + 0.99 * running
            returns.append(running)
        all_obs, all_returns = torch.cat(observations), torch.cat(returns)
        assert norm.count == rewards.count == 32 * iteration
        assert_close(norm.mean, all_obs.mean(0))
        assert_close(norm.var, all_obs.var(0, unbiased=False))
        assert rewards.var.item() == pytest.approx(all_returns.var(unbiased=False).item(), rel=1e-5)


def test_rewards_are_divided_by_std_of_discounted_return() -> None:
    # With γ = 0 the return is the reward: the value target A + V is r / σ, with σ the std of the rewards.
    run = small_run("Pendulum-v1", gamma=0.0, gae_lambda=0.0, normalize_reward=True)
    run.collect()
    batch = run.algo.prepare(run.rollout)
    rewards = run.rollout.rewards
    expected = (rewards / rewards.double().std(unbiased=False).float()).reshape(-1, 1)
    assert_close(batch.returns, expected, atol=1e-4, rtol=1e-4)


# -- complete updates --------------------------------------------------------------------------------------------------


class ReferencePPO:
    """PPO as in the paper: plain loops in float64, separate parameters, and a real break at target_kl."""

    def __init__(self, run: SmallRun, length: int = 1) -> None:
        """`length` is the length of the sequences that a recurrent policy learns from."""
        self.recipe: Recipe = run.algo.recipe
        self.length = length
        self.discrete = run.policy.distribution.heads == 1
        self.n_inputs = int(run.envs.env_spec.obs_layout.space.shape[0])
        self.weights = {n: p.detach().double().clone().requires_grad_() for n, p in run.policy.named_parameters()}
        self.adam = torch.optim.Adam(self.weights.values(), lr=self.recipe.learning_rate, eps=1e-5, foreach=False)

    def recurrent_step(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output and next state of the recurrent layer for one observation."""
        if self.recipe.recurrent == "none":
            return observation, state
        w, size = self.weights, self.recipe.recurrent_size
        hidden = state[:size]
        from_input = w["core.cell.weight_ih"] @ observation + w["core.cell.bias_ih"]
        from_hidden = w["core.cell.weight_hh"] @ hidden + w["core.cell.bias_hh"]
        if self.recipe.recurrent == "gru":
            (r_in, z_in, n_in), (r_hid, z_hid, n_hid) = from_input.split(size), from_hidden.split(size)
            reset, keep = torch.sigmoid(r_in + r_hid), torch.sigmoid(z_in + z_hid)
            hidden = (1 - keep) * torch.tanh(n_in + reset * n_hid) + keep * hidden
            return hidden, hidden
        enter, forget, candidate, out = (from_input + from_hidden).split(size)
        cell = torch.sigmoid(forget) * state[size:] + torch.sigmoid(enter) * torch.tanh(candidate)
        hidden = torch.sigmoid(out) * torch.tanh(cell)
        return hidden, torch.cat([hidden, cell])

    def layers(self, trunk: str, head: str, features: Tensor) -> Tensor:
        w = self.weights
        for layer in ("0", "2"):
            features = torch.tanh(features @ w[f"{trunk}.{layer}.weight"].T + w[f"{trunk}.{layer}.bias"])
        return features @ w[f"{head}.weight"].T + w[f"{head}.bias"]

    def value(self, features: Tensor) -> Tensor:
        trunk = "actor_trunk" if self.recipe.share_trunk else "critic_trunk"
        return self.layers(trunk, "critic_head", features).squeeze(-1)

    def log_prob_and_entropy(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers("actor_trunk", "actor_head", features)
        if self.discrete:
            categories = torch.distributions.Categorical(logits=out)
            return categories.log_prob(action.squeeze(-1)), categories.entropy()
        normal = torch.distributions.Normal(out, self.weights["log_std"].exp())
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)

    def decode(self, packed: Tensor) -> Tensor:
        return floats(packed, self.n_inputs).double()

    @torch.no_grad()
    def transitions(self, rollout: Rollout, env: int) -> list[dict[str, Tensor]]:
        """The steps of one environment, with values, advantages and returns."""
        recipe = self.recipe
        steps, n_envs = rollout.shape
        finals = {int(at): obs for at, obs in zip(rollout.final_at, rollout.final_obs)}
        state = rollout.states[0, env].double()
        records: list[dict[str, Tensor]] = []
        values, next_states = [], []
        for t in range(steps + 1):
            if rollout.starts[t, env]:
                state = torch.zeros_like(state)
            observation, before = self.decode(rollout.obs[t, env]), state
            features, state = self.recurrent_step(observation, state)
            values.append(self.value(features))
            if t == steps:
                break
            action = rollout.actions[t, env].double()
            log_prob, _ = self.log_prob_and_entropy(features, action)
            records.append({"observation": observation, "action": action, "log_prob": log_prob, "state": before})
            records[-1]["start"] = rollout.starts[t, env]
            next_states.append(state)
        advantage = torch.zeros((), dtype=torch.float64)
        for t in reversed(range(steps)):
            next_value = values[t + 1]
            if rollout.terminated[t, env]:
                next_value = torch.zeros_like(next_value)
            elif rollout.truncated[t, env]:
                next_value = self.value(self.recurrent_step(self.decode(finals[t * n_envs + env]), next_states[t])[0])
            delta = rollout.rewards[t, env].double() + recipe.gamma * next_value - values[t]
            continues = not (rollout.terminated[t, env] or rollout.truncated[t, env])
            advantage = delta + recipe.gamma * recipe.gae_lambda * advantage * continues
            records[t] |= {"value": values[t], "advantage": advantage, "return": advantage + values[t]}
        return records

    def features(self, sequence: list[dict[str, Tensor]]) -> list[Tensor]:
        """Outputs of the recurrent layer, from the state at the start of the sequence."""
        state, features = sequence[0]["state"], []
        for record in sequence:
            if record["start"]:
                state = torch.zeros_like(state)
            output, state = self.recurrent_step(record["observation"], state)
            features.append(output)
        return features

    def update(self, rollout: Rollout, progress: float, shuffle: torch.Generator) -> int:
        """Learns from the rollout; returns the number of optimiser steps."""
        recipe, length = self.recipe, self.length
        steps, n_envs = rollout.shape
        linear = 1.0 - progress
        for group in self.adam.param_groups:
            group["lr"] = recipe.learning_rate * (linear if recipe.lr_schedule == "linear" else 1.0)
        clip = recipe.clip_range * (linear if recipe.clip_schedule == "linear" else 1.0)
        per_env = [self.transitions(rollout, env) for env in range(n_envs)]
        sequences = [per_env[env][t : t + length] for t in range(0, steps, length) for env in range(n_envs)]
        updates = 0
        for _ in range(recipe.n_epochs):
            order = torch.randperm(len(sequences), generator=shuffle).tolist()
            per_minibatch = recipe.batch_size // length
            for start in range(0, len(order), per_minibatch):
                chosen = [sequences[i] for i in order[start : start + per_minibatch]]
                features = torch.stack([output for sequence in chosen for output in self.features(sequence)])
                records = [record for sequence in chosen for record in sequence]
                data = {name: torch.stack([record[name] for record in records]) for name in records[0]}
                advantages = data["advantage"]
                if recipe.normalize_advantage:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                log_prob, entropy = self.log_prob_and_entropy(features, data["action"])
                ratio = (log_prob - data["log_prob"]).exp()
                surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
                values = self.value(features)
                if recipe.clip_range_vf is not None:
                    change = (values - data["value"]).clamp(-recipe.clip_range_vf, recipe.clip_range_vf)
                    values = data["value"] + change
                error = ((values - data["return"]) ** 2).mean()
                kl = ((ratio - 1) - ratio.log()).mean()
                if recipe.target_kl is not None and kl > 1.5 * recipe.target_kl:
                    return updates
                self.adam.zero_grad()
                (-surrogate.mean() + recipe.vf_coef * error - recipe.ent_coef * entropy.mean()).backward()
                torch.nn.utils.clip_grad_norm_(self.weights.values(), recipe.max_grad_norm)
                self.adam.step()
                updates += 1
        return updates


def assert_same_weights(run: SmallRun, reference: ReferencePPO) -> None:
    for name, parameter in run.policy.named_parameters():
        assert_close(parameter.detach().double(), reference.weights[name].detach(), atol=2e-5, rtol=1e-4, msg=name)


RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "value clip and entropy": {"clip_range_vf": 0.1, "ent_coef": 0.01, "vf_coef": 0.7},
    "no advantage normalisation": {"normalize_advantage": False, "max_grad_norm": 0.05},
    "shared trunk": {"share_trunk": True},
    "gradients not clipped": {"max_grad_norm": 1e3, "vf_coef": 0.01},
    "schedules": {"lr_schedule": "linear", "clip_schedule": "linear"},
}


@pytest.mark.parametrize("env", [short_cartpole, Drift])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_updates_match_reference(env: Any, recipe: dict[str, Any]) -> None:
    run = small_run(env, learning_rate=1e-3, n_envs=4, batch_size=16, **recipe)
    reference = ReferencePPO(run)
    before = run.algo.parameters.flat.detach().clone()
    for progress in (0.0, 0.5):
        run.collect()
        updates = reference.update(run.rollout, progress, run.shuffle())
        assert run.learn(progress)["updates"] == updates == 8
        assert_same_weights(run, reference)
    assert (run.algo.parameters.flat - before).abs().max() > 1e-3
    assert run.rollout.truncated.any()
    assert run.rollout.terminated.any() == (env is short_cartpole)


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
@pytest.mark.parametrize("env", [short_cartpole, Drift])
def test_recurrent_updates_match_reference(env: Any, recurrent: str) -> None:
    # 2 envs × 24 steps in sequences of 8 (the greatest common divisor of 24 and 16), two per minibatch.
    run = small_run(env, learning_rate=1e-3, n_steps=24, batch_size=16, recurrent=recurrent)
    reference = ReferencePPO(run, length=8)
    before = run.algo.parameters.flat.detach().clone()
    for _ in range(2):
        run.collect()
        updates = reference.update(run.rollout, 0.0, run.shuffle())
        assert run.learn()["updates"] == updates == 6
        assert_same_weights(run, reference)
    assert (run.algo.parameters.flat - before).abs().max() > 1e-3


@pytest.mark.parametrize("env", [short_cartpole, Drift])
@pytest.mark.parametrize(("target_kl", "min_updates", "max_updates"), [(3e-3, 2, 15), (1e-7, 1, 1)])
def test_target_kl_skips_remaining_minibatches_like_a_break(
    env: Any, target_kl: float, min_updates: int, max_updates: int
) -> None:
    # 16 minibatches; the second iteration must continue as if nothing had been skipped.
    run = small_run(env, learning_rate=1e-2, target_kl=target_kl, n_epochs=4)
    reference = ReferencePPO(run)
    for _ in range(2):
        run.collect()
        updates = reference.update(run.rollout, 0.0, run.shuffle())
        assert min_updates <= updates <= max_updates
        assert run.learn()["updates"] == updates
        assert_same_weights(run, reference)


def test_minibatches_after_target_kl_change_nothing() -> None:
    # The KL exceeds the target in the first epoch, so further epochs change nothing.
    runs = [small_run("CartPole-v1", learning_rate=1e-2, target_kl=1e-6, n_epochs=n) for n in (1, 5)]
    for run in runs:
        for _ in range(2):
            run.collect()
            assert run.learn()["updates"] < 4
    assert torch.equal(runs[0].algo.parameters.flat, runs[1].algo.parameters.flat)


# -- Stable-Baselines3 -----------------------------------------------------------------------------------------------


_CLIPPED = {"clip_range_vf": 0.2, "ent_coef": 0.02, "max_grad_norm": 0.1}
_SDE = {"use_sde": True, "sde_sample_freq": 4, "use_expln": True, "log_std_init": -1.0}


@pytest.mark.parametrize(
    ("env", "recipe"),
    [(short_cartpole, {}), (Drift, {}), (short_cartpole, _CLIPPED), (Drift, _CLIPPED), (Drift, {**_CLIPPED, **_SDE})],
    ids=["discrete", "continuous", "discrete, clipped", "continuous, clipped", "gsde"],
)
def test_iteration_matches_stable_baselines3(env: Any, recipe: dict[str, Any]) -> None:
    # The whole batch is one minibatch, so the order of transitions does not matter; three epochs move the ratios.
    sb3 = pytest.importorskip("stable_baselines3")
    run = small_run(env, batch_size=64, n_envs=4, n_epochs=3, learning_rate=2e-3, **recipe)
    model = sb3.PPO(
        "MlpPolicy",
        sb3.common.env_util.make_vec_env(run.maker, 4),
        n_steps=16,
        batch_size=64,
        n_epochs=3,
        learning_rate=2e-3,
        ent_coef=recipe.get("ent_coef", 0.0),
        clip_range_vf=recipe.get("clip_range_vf"),
        max_grad_norm=recipe.get("max_grad_norm", 0.5),
        use_sde=recipe.get("use_sde", False),
        policy_kwargs={"net_arch": [16, 16], "use_expln": recipe.get("use_expln", False)},
        device="cpu",
    )
    theirs, ours = sb3_parameters(model), dict(run.policy.named_parameters())
    for name, parameter in theirs.items():
        parameter.data.copy_(ours[name].view_as(parameter))
    model._logger = sb3.common.logger.Logger(None, [])
    for _ in range(2):
        run.collect()
        fill_sb3_buffer(model, run)
        model.train()
        metrics = run.learn()
        logged = model.logger.name_to_value
        for name, parameter in theirs.items():
            ours_now = ours[name].detach().view_as(parameter)
            assert_close(ours_now, parameter.detach(), atol=1e-5, rtol=1e-4, msg=name)
        assert metrics["value_loss"] == pytest.approx(logged["train/value_loss"], rel=1e-4)
        assert metrics["policy_loss"] == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-5)
        assert metrics["entropy"] == pytest.approx(-logged["train/entropy_loss"], rel=1e-4)
        assert metrics["clip_fraction"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
        assert metrics["explained_variance"] == pytest.approx(logged["train/explained_variance"], rel=1e-3, abs=1e-3)
        assert run.rollout.truncated.any()


def sb3_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Stable-Baselines3's parameters under our names."""
    renamed = {
        "mlp_extractor.policy_net": "actor_trunk",
        "mlp_extractor.value_net": "critic_trunk",
        "action_net": "actor_head",
        "value_net": "critic_head",
        "log_std": "log_std",
    }
    names = {}
    for name, parameter in model.policy.named_parameters():
        prefix = next(old for old in renamed if name.startswith(old))
        names[renamed[prefix] + name.removeprefix(prefix)] = parameter
    return names


@torch.no_grad()
def fill_sb3_buffer(model: Any, run: SmallRun) -> None:
    """Fills Stable-Baselines3's rollout buffer with our rollout; values and log-probabilities are its network's."""
    rollout = run.rollout
    steps, n_envs = rollout.shape
    n_inputs = model.observation_space.shape[0]
    observations = floats(rollout.obs, n_inputs)  # [T + 1, N, ..]
    finals = {int(at): floats(obs, n_inputs) for at, obs in zip(rollout.final_at, rollout.final_obs)}
    from stable_baselines3.common.buffers import RolloutBuffer

    buffer = RolloutBuffer(
        steps, model.observation_space, model.action_space, "cpu", gae_lambda=0.95, gamma=0.99, n_envs=n_envs
    )
    for t in range(steps):
        actions = rollout.actions[t]
        if hasattr(model.action_space, "n"):
            actions = actions.long()
        values, log_probs, _ = model.policy.evaluate_actions(observations[t], actions.squeeze(-1))
        rewards = rollout.rewards[t].numpy().copy()
        for env in range(n_envs):  # as in its collect_rollouts
            if rollout.truncated[t, env]:
                rewards[env] += 0.99 * model.policy.predict_values(finals[t * n_envs + env].unsqueeze(0)).item()
        buffer.add(
            observations[t].numpy(), actions.numpy(), rewards, rollout.starts[t].numpy(), values.flatten(), log_probs
        )
    last = model.policy.predict_values(observations[-1]).flatten()
    buffer.compute_returns_and_advantage(last, rollout.starts[-1].numpy())
    model.rollout_buffer = buffer


# -- schedules and checkpoints ---------------------------------------------------------------------------------------


def test_linear_schedules_reach_zero_at_end_of_run() -> None:
    run = small_run("CartPole-v1", lr_schedule="linear", clip_schedule="linear", learning_rate=1e-3, clip_range=0.2)
    run.collect()
    for progress, factor in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.0)):
        before = run.algo.parameters.flat.detach().clone()
        metrics = run.learn(progress)
        assert metrics["learning_rate"] == pytest.approx(1e-3 * factor)
        assert metrics["clip_range"] == pytest.approx(0.2 * factor)
        assert torch.equal(before, run.algo.parameters.flat) == (factor == 0.0)


def test_constant_schedules_ignore_progress() -> None:
    run = small_run("CartPole-v1", learning_rate=1e-3, clip_range=0.3)
    run.collect()
    metrics = run.learn(0.9)
    assert metrics["learning_rate"] == pytest.approx(1e-3)
    assert metrics["clip_range"] == pytest.approx(0.3)


def test_first_step_is_proportional_to_scheduled_learning_rate() -> None:
    # Adam's first step is proportional to the learning rate, so the scheduled value must reach it.
    moved = []
    for progress in (0.0, 0.9):
        run = small_run("CartPole-v1", lr_schedule="linear", batch_size=32, n_epochs=1)
        run.collect()
        before = run.algo.parameters.flat.detach().clone()
        run.learn(progress)
        moved.append(run.algo.parameters.flat.detach() - before)
    assert_close(moved[1], moved[0] / 10, atol=1e-7, rtol=1e-2)
    assert moved[0].abs().max() > 1e-4


def test_learning_rate_schedule_applies_after_loading_checkpoint() -> None:
    run = small_run("CartPole-v1", lr_schedule="linear")
    run.collect()
    run.learn()
    loaded = copy_of_learner(run)
    before = loaded.parameters.flat.detach().clone()
    assert torch.equal(before, run.algo.parameters.flat)
    loaded.update(run.rollout, 1.0, run.shuffle())
    assert torch.equal(before, loaded.parameters.flat)
    loaded.update(run.rollout, 0.0, run.shuffle())
    assert not torch.equal(before, loaded.parameters.flat)


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_loaded_algorithm_continues_bit_for_bit(recurrent: str) -> None:
    run = small_run("CartPole-v1", normalize_obs=True, normalize_reward=True, recurrent=recurrent, target_kl=0.02)
    run.collect()
    run.learn()
    loaded = copy_of_learner(run)
    run.collect()
    ours = run.learn()
    theirs = loaded.update(run.rollout, 0.0, run.shuffle())
    assert torch.equal(run.algo.parameters.flat, loaded.parameters.flat)
    assert {name: float(value) for name, value in theirs.items()} == ours
    for name, value in run.policy.state_dict().items():
        assert torch.equal(value, loaded.policy.state_dict()[name]), name
    assert torch.equal(run.algo.return_carry, loaded.return_carry)


def test_load_keeps_flat_tensor_and_parameter_views() -> None:
    run = small_run("CartPole-v1")
    flat = run.algo.parameters.flat
    address = flat.data_ptr()
    run.algo.load_state_dict(copy_of_learner(run).state_dict())
    assert run.algo.parameters.flat.data_ptr() == address
    with torch.no_grad():
        flat.zero_()
    assert all((parameter == 0).all() for parameter in run.policy.parameters())


def test_runs_with_same_seed_match_bit_for_bit() -> None:
    first, second = (small_run("CartPole-v1", seed=5) for _ in range(2))
    for run in (first, second):
        for _ in range(2):
            run.collect()
            run.learn()
    assert torch.equal(first.algo.parameters.flat, second.algo.parameters.flat)


# -- recurrence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_sequences_reproduce_log_probs_from_acting(recurrent: str) -> None:
    run = small_run("CartPole-v1", n_steps=64, batch_size=32, recurrent=recurrent, normalize_obs=True)
    inferences = record_inference(run)
    for _ in range(2):
        inferences.clear()
        run.collect()
        batch = run.algo.prepare(run.rollout)
        assert batch.starts is not None
        assert batch.starts[:, 1:].any(), "no episode starts inside a sequence, so the test proves nothing"
        with torch.no_grad():
            params, _ = run.policy(batch.obs, batch.starts, batch.states)
            log_probs, _ = run.policy.distribution.log_prob_and_entropy(params, batch.actions)
        acting = as_sequences(torch.stack([log_prob for log_prob, _ in inferences]), 32)
        assert_close(log_probs, acting, atol=1e-5, rtol=0)
        # A lost state would be noticed: with zero states, the log-probabilities differ.
        if run.iteration == 2:
            with torch.no_grad():
                params, _ = run.policy(batch.obs, batch.starts, torch.zeros_like(batch.states))
                without_state, _ = run.policy.distribution.log_prob_and_entropy(params, batch.actions)
            assert (without_state - acting).abs().max() > 1e-4
        run.learn()


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_truncated_episode_bootstraps_from_final_observation_and_state(recurrent: str) -> None:
    # λ = 0: A = r + γ V(final) − V(obs), so the advantage reveals V(final).
    run = small_run(Drift, recurrent=recurrent, gae_lambda=0.0, n_steps=16, batch_size=16)
    with torch.no_grad():
        run.policy.critic_head.weight.mul_(3)
    run.collect()
    batch = run.algo.prepare(run.rollout)
    length = batch.obs.shape[1]
    steps, n_envs = run.rollout.shape
    finals = {int(at): obs for at, obs in zip(run.rollout.final_at, run.rollout.final_obs)}
    rewards = as_sequences(run.rollout.rewards, length)
    bootstrap = (batch.advantages - rewards + batch.values) / 0.99
    truncated = as_sequences(run.rollout.truncated, length)
    index = as_sequences(torch.arange(steps * n_envs).view(steps, n_envs), length)
    assert truncated.sum() == len(finals) == 3 * n_envs
    for value, at in zip(bootstrap[truncated], index[truncated]):
        t, env = divmod(int(at), n_envs)
        # Feed the five observations of the episode one by one, then the final one.
        state = torch.zeros(1, run.policy.state_size)
        with torch.no_grad():
            for obs in run.rollout.obs[t - 4 : t + 1, env]:
                _, next_state = run.policy.act(obs.unsqueeze(0), state)
                state = state if next_state is None else next_state
            expected = run.policy.value(finals[int(at)].unsqueeze(0), state)
        assert value.item() == pytest.approx(expected.item(), abs=1e-4)


# -- implementations ---------------------------------------------------------------------------------------------------

SMALL = {"n_steps": 16, "n_envs": 2, "batch_size": 8, "n_epochs": 2}


def test_wrong_kernel_is_reported_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [small_run(Drift, **SMALL) for _ in range(2)]
    reports: list[tuple[str, str, str]] = []
    gradient = NumpyMinibatch.gradient
    monkeypatch.setattr(NumpyMinibatch, "gradient", lambda *of: 1.1 * gradient(*of))
    for run, report in zip(runs, (lambda name, error, to: reports.append((name, str(error), to)), no_report)):
        run.algo.ops.dispatch = Dispatch(report)  # type: ignore[attr-defined]
    runs[1].algo.ops.numpy_unsupported = "disabled by the test"  # type: ignore[attr-defined]
    for run in runs:
        run.collect()
        run.learn()
        run.learn()
    expected = "the kernel's policy losses differ from the reference's"
    assert reports == [("PPO minibatch", expected, "uses the plain PyTorch implementation")]
    fallbacks = [run.algo.ops.dispatch.fallbacks["PPO minibatch"] for run in runs]  # type: ignore[attr-defined]
    assert fallbacks == [f"RuntimeError: {expected}", "disabled by the test"]
    assert torch.equal(runs[0].algo.parameters.flat, runs[1].algo.parameters.flat)


def test_verified_kernel_runs_every_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    learn, verifying = NumpyMinibatch.learn, True

    def count(self: NumpyMinibatch, batch: Batch, orders: torch.Tensor) -> None:
        calls.append(len(orders))
        if verifying:
            learn(self, batch, orders)

    monkeypatch.setattr(NumpyMinibatch, "learn", count)
    run = small_run(Drift, **SMALL)
    run.collect()
    run_to_end(run.algo.ops.prepare(run.rollout, None))
    verifying = False
    calls.clear()
    before = run.algo.parameters.flat.detach().clone()
    run.learn()
    assert sum(calls) == 2 * 4
    assert torch.equal(run.algo.parameters.flat, before)  # no other implementation ran


def test_after_gradient_runs_before_clipping_and_step() -> None:
    """Halving the gradient halves Adam's first moment and the logged norm."""
    halved = small_run(Drift, **SMALL, max_grad_norm=1e9)
    plain = small_run(Drift, **SMALL, max_grad_norm=1e9)
    halved.algo.after_gradient = lambda gradient: gradient.mul_(0.5)
    plain.algo.ops.numpy_unsupported = "disabled by the test"  # type: ignore[attr-defined]
    for run in (halved, plain):
        run.collect()
        batch = run.algo.prepare(run.rollout)
        run.algo.ops.reference_learn(batch, torch.arange(8).unsqueeze(0))  # type: ignore[attr-defined]
    assert_close(halved.algo.optimiser.mean, 0.5 * plain.algo.optimiser.mean)  # first moment
    assert_close(halved.algo.optimiser.square, 0.25 * plain.algo.optimiser.square)  # second moment
    assert_close(halved.algo.counters.sums[:, -1], 0.5 * plain.algo.counters.sums[:, -1])  # the norm
    assert plain.algo.optimiser.mean.abs().max() > 0


@pytest.mark.parametrize("in_numpy", [True, False])
def test_after_gradient_gets_every_gradient_before_its_step(in_numpy: bool) -> None:
    """A hook that changes nothing leaves the weights as they are without it, up to rounding."""
    hooked, plain = small_run(Drift, **SMALL), small_run(Drift, **SMALL)
    seen: list[Tensor] = []
    hooked.algo.after_gradient = lambda gradient: seen.append(gradient.clone())
    for run in (hooked, plain):
        if not in_numpy:
            run.algo.ops.numpy_unsupported = "disabled by the test"  # type: ignore[attr-defined]
        run.collect()
        run.learn()
        assert run.algo.ops.in_numpy == in_numpy  # type: ignore[attr-defined]
    assert len(seen) == 2 * 4  # once per minibatch
    assert all(gradient.shape == hooked.algo.parameters.flat.shape for gradient in seen)
    assert_close(hooked.algo.parameters.flat, plain.algo.parameters.flat, rtol=1e-4, atol=1e-6)
