"""Scans, advantages and returns against plain loops and values worked out by hand; all in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from unidle.buffers.advantages import discounted_returns, gae, reverse_scan

FLOATS = st.floats(-10, 10, width=32)
GAINS = st.one_of(st.just(0.0), st.floats(0, 1))


def column(*numbers: float) -> Tensor:
    """[T, 1] in float64."""
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def flags(*values: int) -> Tensor:
    """[T, 1] bool."""
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Tensor]:
    """T × N rewards, values and episode ends of both kinds (never both at once, as from environments)."""
    steps, n_envs = draw(st.integers(1, 33)), draw(st.integers(1, 3))

    def table(length: int, elements: st.SearchStrategy) -> list:
        return draw(st.lists(st.lists(elements, min_size=n_envs, max_size=n_envs), min_size=length, max_size=length))

    ends = torch.tensor(table(steps, st.sampled_from([0, 0, 0, 1, 2])))
    return {
        "rewards": torch.tensor(table(steps, FLOATS), dtype=torch.float64),
        "values": torch.tensor(table(steps + 1, FLOATS), dtype=torch.float64),
        "bootstrap": torch.tensor(table(steps, FLOATS), dtype=torch.float64),
        "terminated": ends == 1,
        "truncated": ends == 2,
    }


# -- reverse_scan ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(GAINS, FLOATS), min_size=1, max_size=70))
def test_reverse_scan_matches_plain_loop(pairs: list[tuple[float, float]]) -> None:
    gain, value = (torch.tensor(part, dtype=torch.float64) for part in zip(*pairs))
    expected, running = [0.0] * len(pairs), 0.0
    for t in reversed(range(len(pairs))):
        running = expected[t] = pairs[t][1] + pairs[t][0] * running
    assert_close(reverse_scan(gain, value), torch.tensor(expected, dtype=torch.float64))


def test_reverse_scan_of_one_step_is_its_value() -> None:
    assert reverse_scan(column(0.9), column(3.0)).tolist() == [[3.0]]


def test_reverse_scan_does_not_modify_its_arguments() -> None:
    gain, value = column(0.5, 0.5, 0.5), column(1.0, 2.0, 3.0)
    reverse_scan(gain, value)
    assert gain.squeeze().tolist() == [0.5, 0.5, 0.5]
    assert value.squeeze().tolist() == [1.0, 2.0, 3.0]


def test_reverse_scan_keeps_environments_separate() -> None:
    gain = torch.tensor([[1.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    value = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=torch.float64)
    assert reverse_scan(gain, value).tolist() == [[3.0, 10.0], [2.0, 20.0]]


# -- gae -------------------------------------------------------------------------------------------------------------
#
# γ = 1/2 and λ = 1/2 throughout the examples, so that every number is exact.


def test_gae_bootstraps_from_next_value_at_rollout_end() -> None:
    # δ₀ = 1 + ½·20 − 10 = 1;  δ₁ = 2 + ½·40 − 20 = 2;  A₁ = 2;  A₀ = 1 + ¼·2 = 1.5
    advantages, returns = gae(column(1, 2), column(10, 20, 40), column(0, 0), flags(0, 0), flags(0, 0), 0.5, 0.5)
    assert advantages.squeeze(1).tolist() == [1.5, 2.0]
    assert returns.squeeze(1).tolist() == [11.5, 22.0]


def test_gae_does_not_bootstrap_after_termination() -> None:
    # The episode ends at step 1, and step 2 belongs to the next one, whose value of 40 must not leak in.
    # δ₀ = 1 + ½·20 − 10 = 1;  δ₁ = 2 + 0 − 20 = −18;  δ₂ = 4 + ½·8 − 40 = −32
    # A₂ = −32;  A₁ = −18;  A₀ = 1 + ¼·(−18) = −3.5
    advantages, returns = gae(
        column(1, 2, 4), column(10, 20, 40, 8), column(0, 0, 0), flags(0, 1, 0), flags(0, 0, 0), 0.5, 0.5
    )
    assert advantages.squeeze(1).tolist() == [-3.5, -18.0, -32.0]
    assert returns.squeeze(1).tolist() == [6.5, 2.0, 8.0]


def test_gae_bootstraps_from_final_observation_after_truncation() -> None:
    # As above, but cut off at step 1, where the true final observation is worth 100 (not 40, the next episode's start).
    # δ₁ = 2 + ½·100 − 20 = 32;  A₁ = 32;  A₀ = 1 + ¼·32 = 9
    advantages, returns = gae(
        column(1, 2, 4), column(10, 20, 40, 8), column(0, 100, 0), flags(0, 0, 0), flags(0, 1, 0), 0.5, 0.5
    )
    assert advantages.squeeze(1).tolist() == [9.0, 32.0, -32.0]
    assert returns.squeeze(1).tolist() == [19.0, 52.0, 8.0]


def test_gae_ignores_next_value_if_episode_ends_with_rollout() -> None:
    # Terminated: δ₁ = 2 − 20 = −18. Truncated, worth 100: δ₁ = 2 + ½·100 − 20 = 32. The 40 is unused in both.
    arguments = column(1, 2), column(10, 20, 40), column(0, 100)
    terminated, _ = gae(*arguments, flags(0, 1), flags(0, 0), 0.5, 0.5)
    truncated, _ = gae(*arguments, flags(0, 0), flags(0, 1), 0.5, 0.5)
    assert terminated.squeeze(1).tolist() == [1 - 18 / 4, -18.0]
    assert truncated.squeeze(1).tolist() == [1 + 32 / 4, 32.0]


def test_gae_of_single_step_is_td_error() -> None:
    advantages, returns = gae(column(3), column(10, 20), column(0), flags(0), flags(0), 0.5, 0.5)
    assert (advantages.item(), returns.item()) == (3.0, 13.0)


@given(rollouts(), st.floats(0, 1))
def test_lambda_0_gives_td_error(data: dict[str, Tensor], gamma: float) -> None:
    advantages, _ = gae(**data, gamma=gamma, lam=0.0)
    steps, n_envs = data["rewards"].shape
    for t in range(steps):
        for env in range(n_envs):
            next_value = data["values"][t + 1, env]
            if data["terminated"][t, env]:
                next_value = 0.0
            if data["truncated"][t, env]:
                next_value = data["bootstrap"][t, env]
            expected = data["rewards"][t, env] + gamma * next_value - data["values"][t, env]
            assert_close(advantages[t, env], expected)


@given(rollouts(), st.floats(0, 1))
def test_lambda_1_gives_monte_carlo_return(data: dict[str, Tensor], gamma: float) -> None:
    _, returns = gae(**data, gamma=gamma, lam=1.0)
    steps, n_envs = data["rewards"].shape
    for env in range(n_envs):
        for t in range(steps):
            total, discount = 0.0, 1.0
            for later in range(t, steps):
                total += discount * data["rewards"][later, env].item()
                discount *= gamma
                if data["terminated"][later, env]:
                    break
                if data["truncated"][later, env]:
                    total += discount * data["bootstrap"][later, env].item()
                    break
            else:
                total += discount * data["values"][steps, env].item()
            assert returns[t, env].item() == pytest.approx(total, abs=1e-9)


def test_importance_below_1_shrinks_later_advantages() -> None:
    # δ = 1, 2, 4. The importance is ½ at step 1 and 3, clipped to 1, at step 2.
    # A₂ = 4;  A₁ = 2 + ¼·1·4 = 3;  A₀ = 1 + ¼·½·3 = 1.375
    advantages, returns = gae(
        column(1, 2, 4),
        column(0, 0, 0, 0),
        column(0, 0, 0),
        flags(0, 0, 0),
        flags(0, 0, 0),
        0.5,
        0.5,
        column(7, 0.5, 3),
    )
    assert advantages.squeeze(1).tolist() == [1.375, 3.0, 4.0]
    assert returns.squeeze(1).tolist() == [1.375, 3.0, 4.0]


@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_importance_of_1_and_above_changes_nothing(data: dict[str, Tensor], gamma: float, lam: float) -> None:
    for ours, theirs in zip(
        gae(**data, gamma=gamma, lam=lam, importance=1 + data["rewards"].abs()), gae(**data, gamma=gamma, lam=lam)
    ):
        assert torch.equal(ours, theirs)


@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_matches_plain_loop(data: dict[str, Tensor], gamma: float, lam: float, weighted: bool) -> None:
    importance = data["rewards"].abs() if weighted else torch.ones_like(data["rewards"])
    advantages, returns = gae(**data, gamma=gamma, lam=lam, importance=importance if weighted else None)
    expected = torch.zeros_like(data["rewards"])
    steps, n_envs = expected.shape
    for env in range(n_envs):
        running = 0.0
        for t in reversed(range(steps)):
            terminated, truncated = bool(data["terminated"][t, env]), bool(data["truncated"][t, env])
            next_value = data["bootstrap"][t, env] if truncated else data["values"][t + 1, env]
            delta = data["rewards"][t, env] - data["values"][t, env] + (0.0 if terminated else gamma * next_value)
            running = delta + (0.0 if terminated or truncated else gamma * lam * running)
            expected[t, env] = running
            running *= min(1.0, importance[t, env].item())
    assert_close(advantages, expected)
    assert_close(returns, expected + data["values"][:-1])


# -- discounted_returns ----------------------------------------------------------------------------------------------


def test_discounted_returns_restart_after_episode_end() -> None:
    # 1; 2 + ½·1 = 2.5 (ends); 4; 8 + ½·4 = 10
    sums, carry = discounted_returns(column(1, 2, 4, 8), flags(0, 1, 0, 0), torch.zeros(1, dtype=torch.float64), 0.5)
    assert sums.squeeze(1).tolist() == [1.0, 2.5, 4.0, 10.0]
    assert carry.tolist() == [10.0]


def test_discounted_returns_carry_is_zero_if_episode_ends_with_rollout() -> None:
    _, carry = discounted_returns(column(1, 2), flags(0, 1), torch.zeros(1, dtype=torch.float64), 0.5)
    assert carry.tolist() == [0.0]


@given(rollouts(), st.floats(0, 1), st.integers(1, 32))
def test_discounted_returns_of_two_rollouts_match_one_long_loop(
    data: dict[str, Tensor], gamma: float, cut: int
) -> None:
    rewards, ended = data["rewards"], data["terminated"] | data["truncated"]
    steps, n_envs = rewards.shape
    carry = torch.zeros(n_envs, dtype=torch.float64)
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        if len(rewards[part]):
            sums, carry = discounted_returns(rewards[part], ended[part], carry, gamma)
            parts.append(sums)
    expected = torch.zeros_like(rewards)
    for env in range(n_envs):
        running = 0.0
        for t in range(steps):
            running = rewards[t, env].item() + gamma * running
            expected[t, env] = running
            if ended[t, env]:
                running = 0.0
        assert carry[env].item() == pytest.approx(running, abs=1e-9)
    assert_close(torch.cat(parts), expected)
