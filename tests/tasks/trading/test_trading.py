"""Trading: the tensor environment against the NumPy one, hand-computed cases, no lookahead, settings, rendering."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DOCS
from torch.utils._python_dispatch import TorchDispatchMode

import unidle
from unidle.envs.device.device_env import State, Step
from unidle.envs.make import env_maker
from unidle.errors import UsageError
from unidle.tasks.trading.device_env import Trading
from unidle.tasks.trading.gym_env import TradingEnv
from unidle.tasks.trading.market import INDICATORS, WARM_UP, generated_market
from unidle.tasks.trading.rules import Rules

KINDS = ["continuous", "discrete"]
CENT = 0.005
SELL, HOLD, BUY = 0, 1, 2


def write_csv(path: Path, prices: np.ndarray) -> str:
    """Write prices to a file without rounding and return its path."""
    dates = np.datetime64("2020-01-01") + np.arange(len(prices))
    names = [f"I{index}" for index in range(prices.shape[1])]
    rows = [[str(day), *(repr(float(price)) for price in row)] for day, row in zip(dates, prices)]
    path.write_text("\n".join(",".join(row) for row in [["date", *names], *rows]) + "\n")
    return str(path)


def constant_then(*last: list[float]) -> np.ndarray:
    """Prices that are constant during the warm-up of the indicators, then follow `last`."""
    return np.array([last[0]] * WARM_UP + list(last), float)


def single_start_rules(data: str, days: int, **rules: Any) -> dict[str, Any]:
    """Rules of an episode over the last `days` days of a file: it has a single start day."""
    return {"data": data, "split": "all", "episode_days": days, **rules}


def random_actions(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Random actions; some rows are extreme: all cash, all in one instrument, or all equal."""
    if kind == "discrete":
        return rng.integers(0, 3, shape).astype(np.float32)
    actions = rng.uniform(-1, 1, shape).astype(np.float32)
    extreme = rng.choice(np.array([-1, 0, 1], np.float32), shape)
    return np.where(rng.random((shape[0], 1)) < 0.3, extreme, actions)


# -- device env against gym env ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.0, 0.001, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_device_env_matches_gym_env_to_the_cent(kind: str, cost: float) -> None:
    rules = {"actions": kind, "cost": cost, "instruments": 5, "days": 600, "episode_days": 50, "ruin": 0.2}
    n_envs, rng = 16, np.random.default_rng(1)
    env, gym_envs = Trading(n_envs, 3, **rules), [TradingEnv(**rules) for _ in range(n_envs)]
    assert env.observation_space == gym_envs[0].observation_space
    assert env.action_space == gym_envs[0].action_space
    assert env.episode_limit == 50
    state, observation = env.begin()
    ends = 0
    for gym_env, day, expected in zip(gym_envs, state["day"].tolist(), observation):
        np.testing.assert_allclose(gym_env.reset(options={"day": day})[0], expected, rtol=1e-5, atol=1e-6)
    for _ in range(130):
        actions = random_actions(kind, rng, (n_envs, 5))
        state, step = env.step(state, torch.from_numpy(actions))
        for index, gym_env in enumerate(gym_envs):
            ends += assert_same_step(gym_env, actions[index], state, step, index)
    assert ends >= 2 * n_envs


def assert_same_step(gym_env: TradingEnv, action: np.ndarray, state: State, step: Step, index: int) -> bool:
    """Compare one step of both; return whether it ended the episode, and reset the Gymnasium environment if so."""
    observation, reward, terminated, truncated, _ = gym_env.step(action)
    np.testing.assert_allclose(step.final_observation[index], observation, rtol=1e-5, atol=1e-6)
    assert step.reward[index].item() == pytest.approx(reward, rel=1e-5, abs=1e-6)
    assert (bool(step.terminated[index]), bool(step.truncated[index])) == (terminated, truncated)
    if terminated or truncated:
        observation, _ = gym_env.reset(options={"day": int(state["day"][index])})
    np.testing.assert_allclose(step.observation[index], observation, rtol=1e-5, atol=1e-6)
    assert state["cash"][index].item() == pytest.approx(gym_env.cash, rel=0, abs=CENT)
    portfolio_value = state["holdings"][index].numpy() * gym_env.market.prices[gym_env.day]
    np.testing.assert_allclose(
        portfolio_value, np.array(gym_env.holdings) * gym_env.market.prices[gym_env.day], rtol=0, atol=CENT
    )
    assert int(state["day"][index]) == gym_env.day
    return terminated or truncated


@pytest.mark.parametrize("kind", KINDS)
def test_ruin_happens_on_the_same_day_in_both_envs(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    falling = 100 * np.exp(np.cumsum(rng.normal(-0.03, 0.08, (WARM_UP + 200, 3)), axis=0))
    rules = single_start_rules(write_csv(tmp_path / "falling.csv", falling), 30, actions=kind, trade_fraction=0.5)
    env, gym_envs = Trading(8, 0, **rules), [TradingEnv(**rules) for _ in range(8)]
    state, _ = env.begin()
    ruined = truncated = 0
    for gym_env, day in zip(gym_envs, state["day"].tolist()):
        gym_env.reset(options={"day": day})
    for _ in range(150):
        actions = random_actions(kind, rng, (8, 3))
        state, step = env.step(state, torch.from_numpy(actions))
        for index, gym_env in enumerate(gym_envs):
            assert_same_step(gym_env, actions[index], state, step, index)
        ruined, truncated = ruined + int(step.terminated.sum()), truncated + int(step.truncated.sum())
    assert ruined > 10
    assert truncated > 3


@settings(max_examples=200, deadline=None)
@given(
    cost=st.floats(0, 0.1),
    wishes=st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4),
    units=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e5)), min_size=4, max_size=4),
    cash=st.floats(1, 1e9),
)
def test_target_weights_are_reached_net_of_costs(
    cost: float, wishes: list[float], units: list[float], cash: float
) -> None:
    rules: dict[str, Any] = {"instruments": 4, "days": 200, "episode_days": 5, "split": "all", "cost": cost, "ruin": 0}
    env, gym_env = Trading(1, 0, **rules), TradingEnv(**rules)
    state, _ = env.begin()
    day = int(state["day"])
    state = {
        **state,
        "cash": torch.tensor([cash], dtype=torch.float64),
        "holdings": torch.tensor([units], dtype=torch.float64),
    }
    prices = env._prices[day].numpy()
    portfolio_value, held = cash + float(units @ prices), np.array(units) * prices
    state, _ = env.step(state, torch.tensor([wishes]))
    now = state["holdings"][0].numpy() * prices
    left = float(state["cash"][0]) + now.sum()
    weights = np.maximum(wishes, 0) / max(np.maximum(wishes, 0).sum(), 1)
    np.testing.assert_allclose(now, weights * left, rtol=1e-12, atol=1e-9 * portfolio_value)
    assert portfolio_value - left == pytest.approx(
        cost * np.abs(now - held).sum(), rel=1e-9, abs=1e-12 * portfolio_value
    )
    assert float(state["cash"][0]) >= 0
    gym_env.reset(options={"day": day})
    gym_env.cash, gym_env.holdings = cash, list(units)
    gym_env.step(wishes)
    assert gym_env.cash == pytest.approx(float(state["cash"][0]), rel=0, abs=1e-12 * portfolio_value)
    np.testing.assert_allclose(np.array(gym_env.holdings) * prices, now, rtol=1e-11, atol=1e-12 * portfolio_value)


@settings(max_examples=200, deadline=None)
@given(
    cost=st.floats(0, 0.1),
    fraction=st.floats(0.01, 1),
    choices=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    units=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e5)), min_size=4, max_size=4),
    cash=st.floats(0, 1e9),
)
def test_discrete_orders_lose_only_their_costs(
    cost: float, fraction: float, choices: list[int], units: list[float], cash: float
) -> None:
    rules: dict[str, Any] = {"instruments": 4, "days": 200, "episode_days": 5, "split": "all", "actions": "discrete"}
    env = Trading(1, 0, cost=cost, trade_fraction=fraction, ruin=0, **rules)
    state, _ = env.begin()
    prices = env._prices[int(state["day"])].numpy()
    state = {
        **state,
        "cash": torch.tensor([cash + 1], dtype=torch.float64),
        "holdings": torch.tensor([units], dtype=torch.float64),
    }
    portfolio_value = cash + 1 + float(units @ prices)
    state, _ = env.step(state, torch.tensor([choices]).float())
    after, left = state["holdings"][0].numpy(), float(state["cash"][0])
    traded = np.abs(after - units) * prices
    assert portfolio_value - left - float(after @ prices) == pytest.approx(
        cost * traded.sum(), rel=1e-9, abs=1e-12 * portfolio_value
    )
    assert left >= 0
    assert (after >= 0).all()
    assert (traded <= fraction * portfolio_value * (1 + 1e-12)).all()
    for choice, before, unit in zip(choices, units, after):
        assert {SELL: unit <= before, HOLD: unit == before, BUY: unit >= before}[choice]
        assert (
            choice != SELL
            or unit == 0
            or (before - unit) * prices[after == unit][0] == pytest.approx(fraction * portfolio_value)
        )


# -- hand-computed cases -----------------------------------------------------------------------------------------------


def test_buying_and_selling_match_hand_computation(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "doubles.csv", constant_then([10.0, 5.0], [20.0, 5.0], [20.0, 5.0]))
    rules = single_start_rules(data, 2, cost=0.01, cash=1000.0, reward_scale=1.0)
    env, gym_env = Trading(1, 0, **rules), TradingEnv(**rules)
    # All cash into the first instrument: u = 1000 - 0.01 u, 99.0099 units, worth twice as much the next day.
    invested = 1000 / 1.01
    sold = 2 * invested * 0.99
    state, _ = env.begin()
    gym_env.reset(seed=0)
    state, first = env.step(state, torch.tensor([[1.0, -1.0]]))
    assert state["holdings"][0].tolist() == pytest.approx([invested / 10, 0.0])
    assert state["cash"].item() == pytest.approx(0.0, abs=1e-9)
    assert first.reward.item() == pytest.approx(math.log(2 / 1.01), rel=1e-6)
    assert first.observation[0, :4].tolist() == pytest.approx([0.0, 1.0, 0.0, math.log(2 / 1.01)], abs=1e-6)
    state, second = env.step(state, torch.tensor([[-1.0, 0.0]]))
    assert second.reward.item() == pytest.approx(math.log(0.99), rel=1e-5)
    assert bool(second.truncated)
    assert second.final_observation[0, :4].tolist() == pytest.approx([1.0, 0.0, 0.0, math.log(sold / 1000)], abs=1e-6)
    assert gym_env.step([1.0, -1.0])[1] == pytest.approx(math.log(2 / 1.01), rel=1e-12)
    assert (gym_env.cash, gym_env.holdings) == (pytest.approx(0.0, abs=1e-9), [pytest.approx(invested / 10), 0.0])
    assert gym_env.step([-1.0, 0.0])[1:4] == (pytest.approx(math.log(0.99), rel=1e-12), False, True)
    assert (gym_env.cash, gym_env.holdings) == (pytest.approx(sold), [0.0, 0.0])


def test_discrete_orders_match_hand_computation(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "orders.csv", constant_then([10.0, 5.0], [20.0, 5.0], [20.0, 5.0], [20.0, 5.0]))
    rules = single_start_rules(data, 3, actions="discrete", cost=0.01, cash=1000.0, trade_fraction=0.6)
    env, gym_env = Trading(1, 0, **rules), TradingEnv(**rules)
    # Two orders of 600 cost 1212 with fees, so each is filled to 1000 / 1212.
    part = 600 * 1000 / 1212
    # The next day the first holding is worth 2 · part of 3 · part altogether: 0.6 of that is sold.
    portfolio_value = 3 * part
    portion = 0.6 * portfolio_value
    steps = [
        ([BUY, BUY], 0.0, [part / 10, part / 5]),
        ([SELL, HOLD], portion * 0.99, [part / 10 - portion / 20, part / 5]),
        # The second holding is worth less than a portion: all of it is sold.
        ([HOLD, SELL], (portion + part) * 0.99, [part / 10 - portion / 20, 0.0]),
    ]
    state, _ = env.begin()
    gym_env.reset(seed=0)
    for at, (choices, cash, holdings) in enumerate(steps):
        state, _ = env.step(state, torch.tensor([choices]).float())
        gym_env.step(np.array(choices))
        assert (gym_env.cash, gym_env.holdings) == (pytest.approx(cash, abs=1e-9), pytest.approx(holdings))
        if at < 2:  # the last step begins a new episode
            assert state["cash"].item() == pytest.approx(cash, abs=1e-9)
            assert state["holdings"][0].tolist() == pytest.approx(holdings)
    assert gym_env.holdings[1] == 0.0


def test_episode_terminates_only_below_the_ruin_threshold(tmp_path: Path) -> None:
    for last, ruined in ((5.0, False), (4.99, True)):
        data = write_csv(tmp_path / f"to {last}.csv", constant_then([10.0], [last], [last]))
        rules = single_start_rules(data, 2, cost=0.0, ruin=0.5)
        state, _ = (env := Trading(1, 0, **rules)).begin()
        gym_env = TradingEnv(**rules)
        gym_env.reset(seed=0)
        state, step = env.step(state, torch.ones(1, 1))
        assert (bool(step.terminated), bool(step.truncated)) == (ruined, False)
        assert gym_env.step([1.0])[2:4] == (ruined, False)
        assert state["episode"].item() == ruined


def test_ruin_on_the_last_day_terminates_without_truncation(tmp_path: Path) -> None:
    rules = single_start_rules(write_csv(tmp_path / "last.csv", constant_then([10.0], [1.0])), 1)
    state, _ = (env := Trading(1, 0, **rules)).begin()
    gym_env = TradingEnv(**rules)
    gym_env.reset(seed=0)
    step = env.step(state, torch.ones(1, 1))[1]
    assert (bool(step.terminated), bool(step.truncated)) == (True, False)
    assert gym_env.step([1.0])[2:4] == (True, False)


def test_observation_contains_weights_gain_and_indicators() -> None:
    rules = {"instruments": 3, "days": 300, "episode_days": 20}
    env = Trading(5, 0, **rules)
    market = generated_market(3, 300, 0)
    state, first = env.begin()
    assert first.dtype == torch.float32
    assert first.shape == (5, 2 + 3 + 3 * INDICATORS)
    assert first[:, :5].tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]] * 5
    state, step = env.step(state, torch.tensor([[0.2, 0.5, -1.0]] * 5))
    portfolio_value = state["cash"] + (state["holdings"] * torch.from_numpy(market.prices[state["day"]].copy())).sum(-1)
    torch.testing.assert_close(step.observation[:, 0], (state["cash"] / portfolio_value).float())
    torch.testing.assert_close(step.observation[:, 4], torch.log(portfolio_value / 1e6).float())
    assert (step.observation[:, 2] > 0.45).all()
    assert (step.observation[:, 3] == 0).all()
    known = torch.from_numpy(market.indicators[state["day"]].copy()).flatten(1)
    assert torch.equal(step.observation[:, 5:], known)


# -- no lookahead ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 8), kind=st.sampled_from(KINDS))
def test_observations_do_not_depend_on_later_prices(
    seed: int, steps: int, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("prices")
    prices = 100 * np.exp(np.cumsum(rng.normal(0, 0.02, (WARM_UP + 10, 3)), axis=0))
    other = prices.copy()
    other[WARM_UP + steps + 1 :] *= rng.uniform(0.5, 2, (9 - steps, 3))
    actions = random_actions(kind, rng, (9, 3))
    observed = []
    for name, table in (("one", prices), ("other", other)):
        rules = single_start_rules(write_csv(folder / f"{name}.csv", table), 9, actions=kind, ruin=0)
        env, gym_env = Trading(1, 0, **rules), TradingEnv(**rules)
        state, observation = env.begin()
        pairs = [(observation[0].numpy(), gym_env.reset(seed=0)[0])]
        for action in actions:
            state, step = env.step(state, torch.from_numpy(action)[None])
            pairs.append((step.final_observation[0].numpy(), gym_env.step(action)[0]))
        observed.append(pairs)
    for env_index in (0, 1):
        for day in range(10):
            same = np.array_equal(observed[0][day][env_index], observed[1][day][env_index])
            assert same == (day <= steps)


def test_training_never_sees_test_days(tmp_path: Path) -> None:
    prices = np.array(generated_market(2, 300, 0).prices)
    prices[240:] = 1e6 * np.arange(1, 61)[:, None]  # any use of them would show in the rewards
    data = write_csv(tmp_path / "marked.csv", prices)
    env = Trading(2000, 0, data=data, episode_days=30)
    state, _ = env.begin()
    assert (int(state["day"].min()), int(state["day"].max())) == (WARM_UP, 240 - 1 - 30)
    for _ in range(30):
        state, step = env.step(state, torch.ones(2000, 2))
        assert step.reward.max() < 20
    assert bool(step.truncated.all())
    test_env = Trading(2000, 0, data=data, episode_days=30, split="test")
    state, observation = test_env.begin()
    assert (int(state["day"].min()), int(state["day"].max())) == (240, 300 - 1 - 30)
    assert bool(torch.isfinite(observation).all())


def test_split_date_separates_training_and_test_days(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "prices.csv", np.array(generated_market(2, 300, 0).prices))
    date = str(np.datetime64("2020-01-01") + 100)
    for split, first, last in (("train", WARM_UP, 100 - 6), ("test", 100, 300 - 6), ("all", WARM_UP, 300 - 6)):
        starts = TradingEnv(data=data, split=split, split_date=date, episode_days=5).rules.starts
        assert (starts[0], starts[-1]) == (first, last)


# -- randomness and resets ---------------------------------------------------------------------------------------------


def roll_out(env: Trading, steps: int = 40) -> tuple[list[State], list[Step]]:
    state, _ = env.begin()
    states, steps_taken = [state], []
    actions = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (steps, 1, 2)).astype(np.float32))
    for action in actions:
        state, step = env.step(state, action.expand(env.n_envs, 2))
        states.append(state)
        steps_taken.append(step)
    return states, steps_taken


def test_episodes_are_reproducible_and_differ_by_env_and_seed() -> None:
    rules = {"instruments": 2, "days": 2000, "episode_days": 15}
    states, steps = roll_out(Trading(50, 1, **rules))
    again_states, again = roll_out(Trading(50, 1, **rules))
    for one, other in zip(steps, again):
        for field, same in zip(one, other):
            assert torch.equal(field, same)
    for one, other in zip(states, again_states):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    days = states[0]["day"]
    assert len(days.unique()) > 40
    assert (days == roll_out(Trading(50, 2, **rules))[0][0]["day"]).float().mean() < 0.1
    assert (days == states[15]["day"]).float().mean() < 0.1  # the next episode
    part = Trading(10, 1, first_index=20, **rules)
    assert torch.equal(part.begin()[0]["day"], days[20:30])


def test_start_days_are_uniform() -> None:
    env = Trading(20_000, 0, instruments=1, days=200, episode_days=40)
    days = env.begin()[0]["day"]
    counts = torch.bincount(days)[WARM_UP:]
    assert int(days.max()) == 160 - 1 - 40
    assert len(counts) == 60
    assert (counts - 20_000 / 60).abs().max() < 5 * math.sqrt(20_000 / 60)
    gym_env = TradingEnv(instruments=1, days=200, episode_days=40)
    drawn = [gym_env.reset(seed=seed)[1]["day"] for seed in range(1000)]
    assert (min(drawn), max(drawn)) == (WARM_UP, 160 - 1 - 40)


def test_only_finished_episodes_are_reset() -> None:
    env = Trading(4, 0, instruments=2, days=300, episode_days=20)
    state, _ = env.begin()
    state, _ = env.step(state, torch.ones(4, 2))
    state["length"] = torch.tensor([19, 1, 19, 7])
    after, step = env.step(state, torch.ones(4, 2))
    assert step.truncated.tolist() == [True, False, True, False]
    assert after["length"].tolist() == [0, 2, 0, 8]
    assert after["episode"].tolist() == [1, 0, 1, 0]
    assert torch.equal(step.observation[1], step.final_observation[1])
    for ended in (0, 2):
        assert after["cash"][ended] == 1e6
        assert (after["holdings"][ended] == 0).all()
        assert step.observation[ended, 0] == 1
        assert step.final_observation[ended, 0] < 1e-6
    assert (after["day"] == state["day"] + 1).tolist() == [False, True, False, True]


class ForbidHostAccess(TorchDispatchMode):
    """Fails on what CUDA graph capture forbids: reading a value on the host, or copying one to the device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in self.FORBIDDEN), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_step_needs_no_host_access_and_keeps_its_input_state(kind: str) -> None:
    env = Trading(8, 0, actions=kind, instruments=3, days=300, episode_days=2)
    state, _ = env.begin()
    before = {name: value.clone() for name, value in state.items()}
    action = torch.from_numpy(random_actions(kind, np.random.default_rng(0), (8, 3)))
    with ForbidHostAccess():
        moved, _ = env.step(state, action)
        env.step(moved, action)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    assert {name: (value.shape, value.dtype) for name, value in moved.items()} == {
        name: (value.shape, value.dtype) for name, value in before.items()
    }
    with pytest.raises(AssertionError), ForbidHostAccess():
        float(state["cash"][0])


# -- returns of simple policies ----------------------------------------------------------------------------------------


def episode_returns(rules: dict[str, Any], action: torch.Tensor | None) -> torch.Tensor:
    """[N] returns of an episode with a constant action; without one, with random target weights."""
    env = Trading(500, 0, **rules)
    state, _ = env.begin()
    sums = torch.zeros(500)
    generator = torch.Generator().manual_seed(0)
    for _ in range(env.episode_limit):
        actions = torch.rand(500, 4, generator=generator) * 2 - 1 if action is None else action.expand(500, 4)
        state, step = env.step(state, actions)
        sums += step.reward
    assert bool(step.truncated.all())
    return sums


def test_returns_of_cash_buy_and_hold_and_random_trading() -> None:
    rules: dict[str, Any] = {"instruments": 4, "days": 1000, "episode_days": 60, "ruin": 0.0}
    assert (episode_returns(rules, torch.full((4,), -1.0)) == 0).all()
    assert (episode_returns({**rules, "actions": "discrete"}, torch.full((4,), 1.0)) == 0).all()
    prices = torch.tensor(generated_market(4, 1000, 0).prices)
    day = Trading(500, 0, **rules).begin()[0]["day"]
    held = 100 * torch.log(prices[day + 60, 2] / prices[day, 2] / 1.001)
    torch.testing.assert_close(episode_returns(rules, torch.tensor([-1.0, 0, 1, 0])), held.float(), rtol=0, atol=1e-3)
    random, free = episode_returns(rules, None), episode_returns({**rules, "cost": 0.0}, None)
    even = episode_returns(rules, torch.ones(4))
    # About half of the portfolio is traded each day: 60 days cost 2 to 6 per cent.
    assert 2 < float((free - random).mean()) < 6
    assert float((even - random).mean()) > 2


@pytest.mark.learning
def test_ppo_memorises_a_short_history_and_beats_buy_and_hold(tmp_path: Path) -> None:
    rules = {"instruments": 2, "days": 400, "episode_days": 40}
    run = unidle.train(
        "unidle/Trading-v0",
        env_kwargs=rules,
        preset="classic",
        n_envs=64,
        n_steps=32,
        batch_size=512,
        n_epochs=4,
        learning_rate=1e-3,
        gamma=0.9,
        timesteps=80_000,
        eval_every=40_000,
        tensorboard=False,
        runs_dir=str(tmp_path),
        quiet=True,
    )
    starts, prices = np.arange(WARM_UP, 320 - 40), generated_market(2, 400, 0).prices
    held = 100 * np.log((prices[starts + 40] / prices[starts]).mean(1) / 1.001).mean()
    assert run.evaluate(episodes=50).mean_return > held + 4


# -- invalid settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"actions": "both"}, "actions is `both`; use continuous or discrete"),
        ({"split": "dev"}, "train, test or all"),
        ({"split_date": "soon"}, "split_date is `soon`"),
        ({"data": "none.csv"}, "There is no file none.csv"),
        ({"data": "none.csv", "instruments": 3}, "instruments applies only to a generated market"),
        ({"data": "none.csv", "market_seed": 0}, "market_seed applies only to a generated market"),
        ({"instruments": 0}, "instruments is 0; use an integer of at least 1"),
        ({"days": 2.5}, "days is 2.5; use an integer"),
        ({"market_seed": -1}, "market_seed is -1; use an integer of at least 0"),
        ({"episode_days": 0}, "episode_days is 0; use an integer of at least 1"),
        ({"episode_days": True}, "episode_days is True"),
        ({"cost": -0.1}, "cost is -0.1; use a number from 0 to 0.1"),
        ({"cost": 0.2}, "cost is 0.2"),
        ({"cost": "low"}, "cost is 'low'"),
        ({"cash": 0}, "cash is 0; use a number above 0"),
        ({"cash": math.inf}, "cash is inf"),
        ({"ruin": 1.0}, "ruin is 1.0"),
        ({"trade_fraction": 0}, "trade_fraction is 0"),
        ({"trade_fraction": 1.5}, "trade_fraction is 1.5"),
        ({"reward_scale": math.nan}, "reward_scale is nan"),
        ({"days": 100, "episode_days": 20}, "`train` has 80 days, but an episode needs 21"),
        ({"days": 100, "split": "test", "episode_days": 20}, "`test` has 20 days"),
        ({"split": "test", "split_date": "2100-01-01"}, "`test` has 0 days"),
    ],
)
@pytest.mark.parametrize(
    "make_env", [lambda **rules: Trading(1, 0, **rules), TradingEnv], ids=["device_env", "gym_env"]
)
def test_invalid_rules_are_refused(make_env: Any, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_env(**rules)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_minimum_number_of_days_is_accepted() -> None:
    rules: dict[str, Any] = {"split": "all", "episode_days": 20, "instruments": 1}
    assert list(TradingEnv(days=WARM_UP + 21, **rules).rules.starts) == [WARM_UP]
    with pytest.raises(UsageError, match="lower episode_days"):
        TradingEnv(days=WARM_UP + 20, **rules)


def test_reset_day_must_leave_room_for_an_episode() -> None:
    env = TradingEnv(days=300, episode_days=20)
    for day in (WARM_UP, 240 - 21):
        assert env.reset(options={"day": day})[1]["day"] == day
    for day in (WARM_UP - 1, 240 - 20):
        with pytest.raises(UsageError, match=rf"from {WARM_UP} to {240 - 21}"):
            env.reset(options={"day": day})


# -- Gymnasium environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error:.*:UserWarning")
def test_gym_env_passes_gymnasium_check_env(kind: str) -> None:
    check_env(TradingEnv(render_mode="rgb_array", actions=kind, days=300, episode_days=20), skip_render_check=True)


def test_env_id_makes_both_envs_and_rejects_unknown_kwargs() -> None:
    maker = env_maker("unidle/Trading-v0", {"instruments": 3})
    assert isinstance(maker.device_env(2, 0), Trading)
    assert isinstance(maker(), TradingEnv)
    with pytest.raises(UsageError, match="leverage"):
        env_maker("unidle/Trading-v0", {"leverage": 2}).device_env(2, 0)


def test_docs_list_every_setting_with_its_default() -> None:
    page = (DOCS / "device-environments.md").read_text()
    section = page.partition("## Trading\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    documented = {
        name.strip(" `"): default.strip()
        for names, defaults in rows
        for name, default in zip(names.split(","), defaults.split(","), strict=True)
    }
    rules = TradingEnv().rules
    built_in = {"instruments": len(rules.market.names), "days": len(rules.market.dates), "market_seed": 0}
    assert {field.name for field in dataclasses.fields(Rules)} <= documented.keys()
    for field in dataclasses.fields(Rules):
        default = built_in.get(field.name, field.default)
        assert documented[field.name] == (
            "none" if default is None else f"{default:.10g}" if _is_number(default) else default
        )
    assert np.array_equal(rules.market.prices, generated_market(*built_in.values()).prices)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def test_gym_env_does_not_import_torch() -> None:
    code = "import sys, unidle.tasks.trading.gym_env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_render_shows_gain_and_portfolio_weights(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rises.csv", constant_then([10.0, 10.0], [11.0, 10.0], [12.0, 10.0]))
    env = TradingEnv(render_mode="rgb_array", **single_start_rules(data, 2))
    env.reset(seed=0)
    start = env.render()
    for _ in range(2):
        env.step([1.0, -1.0])
    picture = env.render()
    assert start is not None
    assert picture is not None
    assert picture.shape == start.shape
    assert picture.dtype == np.uint8
    height, width, _ = picture.shape
    blue, green = (picture == (30, 90, 200)).all(-1), (start == (90, 160, 90)).all(-1)
    bars, third = slice(height * 3 // 4, None), width // 3
    # First all in cash (the left bar), at the end all in the first instrument (the middle bar).
    assert green[bars, : third - 5].mean() > 0.7
    assert not green[:, third + 5 :].any()
    assert blue[bars, third + 5 : 2 * third - 5].mean() > 0.7
    assert not blue[bars, 2 * third + 5 :].any()
    # The portfolio's curve ends above the mean of the market, which gains half as much.
    curve, mean = blue[: height // 2], (picture == (150, 150, 150)).all(-1)[: height // 2]
    last = np.flatnonzero(curve.any(0))[-1]
    top, market_top = np.flatnonzero(curve[:, last])[0], np.flatnonzero(mean[:, last])[0]
    first_top = np.flatnonzero(curve[:, np.flatnonzero(curve.any(0))[0]])[0]
    assert top < market_top < first_top
    assert TradingEnv(data=data, split="all", episode_days=2).render() is None
