"""Trading on tensors: many portfolios in one market, each on its own day. The rules are in `rules`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unidle.envs.device.device_env import State, Step, uniform
from unidle.tasks.trading.market import BOUND
from unidle.tasks.trading.rules import BUY, SELL, Rules


class Trading:
    """N portfolios. Money and units are float64: a million is exact to far below a cent."""

    def __init__(
        self, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0, **rules: Any
    ) -> None:
        """`rules` are the fields of `Rules`."""
        self._rules, self._seed, self.n_envs = Rules(**rules), seed, n_envs
        self.observation_space, self.action_space = self._rules.observation_space, self._rules.action_space
        self.episode_limit = self._rules.episode_days
        self._trade = self._order if self._rules.actions == "discrete" else self._rebalance
        self._env = torch.arange(first_index, first_index + n_envs, device=device)
        market = self._rules.market
        self._prices = torch.tensor(market.prices, device=device)  # [T, K]
        self._indicators = torch.tensor(market.indicators, device=device).flatten(1)  # [T, K · INDICATORS]
        # Each iteration reduces the error by a factor of `cost`, starting below 2 · cost of the value.
        cost = self._rules.cost
        self._iterations = math.ceil(math.log(0.5e-16) / math.log(cost)) - 1 if cost else 0

    def begin(self) -> tuple[State, Tensor]:
        """Return the state and observation at the start of episode 0 of every environment."""
        state = self._initial_state(torch.zeros_like(self._env))
        return state, self._observe(state)

    def _initial_state(self, episode: Tensor) -> State:
        starts = self._rules.starts
        # A product in float32 can round up to the number of starts.
        place = (uniform(self._seed, self._env, episode, 1)[:, 0] * len(starts)).long().clamp(max=len(starts) - 1)
        cash = torch.full((self.n_envs,), self._rules.cash, dtype=torch.float64, device=self._env.device)
        return {
            "cash": cash,
            "holdings": torch.zeros_like(cash).unsqueeze(-1).repeat(1, self._prices.shape[1]),  # units
            "day": starts.start + place,
            "episode": episode,
            "length": torch.zeros_like(episode),
        }

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, K]."""
        rules, before = self._rules, self._portfolio_value(state)
        cash, holdings = self._trade(state, action)
        length = state["length"] + 1
        new_state = {**state, "cash": cash, "holdings": holdings, "day": state["day"] + 1, "length": length}
        after = self._portfolio_value(new_state)
        reward = (rules.reward_scale * torch.log(after / before)).float()
        terminated = after < rules.ruin * rules.cash
        truncated = (length >= rules.episode_days) & ~terminated
        ended = terminated | truncated
        final = self._observe(new_state)
        new_state["episode"] = state["episode"] + ended
        initial = self._initial_state(new_state["episode"])
        new_state = {
            name: torch.where(_broadcast(ended, value), initial[name], value) for name, value in new_state.items()
        }
        observation = torch.where(ended.unsqueeze(-1), self._observe(new_state), final)
        return new_state, Step(observation, final, reward, terminated, truncated)

    def _portfolio_value(self, state: State) -> Tensor:
        return state["cash"] + (state["holdings"] * self._prices[state["day"]]).sum(-1)

    def _observe(self, state: State) -> Tensor:
        held = state["holdings"] * self._prices[state["day"]]
        value = state["cash"].unsqueeze(-1) + held.sum(-1, keepdim=True)
        gain = torch.log(value / self._rules.cash).clamp(-BOUND, BOUND)
        portfolio = torch.cat((state["cash"].unsqueeze(-1) / value, held / value, gain), -1)
        return torch.cat((portfolio.float(), self._indicators[state["day"]]), -1)

    def _rebalance(self, state: State, action: Tensor) -> tuple[Tensor, Tensor]:
        """Cash and holdings [N, K] at target weights."""
        prices, cost = self._prices[state["day"]], self._rules.cost
        targets = action.double().clamp(0.0, 1.0)
        weights = targets / targets.sum(-1, keepdim=True).clamp(min=1.0)
        held = state["holdings"] * prices
        value_after = value = state["cash"].unsqueeze(-1) + held.sum(-1, keepdim=True)
        for _ in range(self._iterations):
            value_after = value - cost * (weights * value_after - held).abs().sum(-1, keepdim=True)
        bought = weights * value_after - held
        paid = bought.sum(-1) + cost * bought.abs().sum(-1)
        # Rounding must not make cash negative.
        return (state["cash"] - paid).clamp(min=0.0), weights * value_after / prices

    def _order(self, state: State, action: Tensor) -> tuple[Tensor, Tensor]:
        """Cash and holdings [N, K] after sales and purchases."""
        prices, cost = self._prices[state["day"]], self._rules.cost
        portion = self._rules.trade_fraction * self._portfolio_value(state).unsqueeze(-1) / prices  # units
        sold = torch.minimum(portion, state["holdings"]) * (action < SELL + 0.5)
        cash = state["cash"] + (1 - cost) * (sold * prices).sum(-1)
        ordered = portion * (action > BUY - 0.5)
        price = (1 + cost) * (ordered * prices).sum(-1)
        paid = torch.minimum(price, cash)
        # Without purchases `paid` is 0, so any divisor will do.
        bought = ordered * (paid / torch.where(price > 0, price, 1.0)).unsqueeze(-1)
        return cash - paid, state["holdings"] - sold + bought


def _broadcast(ended: Tensor, value: Tensor) -> Tensor:
    """Reshape [N] to [N, 1, ..], to broadcast with `value`."""
    return ended.view(-1, *(1,) * (value.dim() - 1))
