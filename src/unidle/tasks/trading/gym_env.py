"""One portfolio as a gymnasium.Env, written for clarity; the tests compare the tensor version with it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

from unidle.errors import UsageError
from unidle.tasks.trading.market import BOUND
from unidle.tasks.trading.rules import BUY, SELL, Rules


class TradingEnv(gymnasium.Env):
    """`unidle/Trading-v0` as one environment, on the host."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **rules: Any) -> None:
        """`rules` are those of `Rules`."""
        self.rules = Rules(**rules)
        self.render_mode = render_mode
        self.observation_space, self.action_space = self.rules.observation_space, self.rules.action_space
        self.market = self.rules.market
        self.cash, self.holdings, self.day = self.rules.cash, [0.0] * len(self.market.names), self.rules.starts.start
        self._first_day = self.day
        self._values: list[float] = []  # since the start of the episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start in cash, on a random day or on day `options["day"]` of the market."""
        super().reset(seed=seed)
        starts = self.rules.starts
        day = (options or {}).get("day")
        if day is not None and day not in starts:
            raise UsageError(
                f"No episode can start on day {day}; choose a day from {starts.start} to {starts.stop - 1}."
            )
        self.day = int(self.np_random.integers(starts.start, starts.stop)) if day is None else int(day)
        self.cash, self.holdings = self.rules.cash, [0.0] * len(self.market.names)
        self._first_day, self._values = self.day, [self.cash]
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Trade at today's prices and advance to the next day."""
        before = self.portfolio_value()
        if self.rules.actions == "discrete":
            self._order([int(choice) for choice in action])
        else:
            self._rebalance(_weights([float(target) for target in action]))
        self.day += 1
        after = self.portfolio_value()
        self._values.append(after)
        reward = self.rules.reward_scale * math.log(after / before)
        terminated = after < self.rules.ruin * self.rules.cash
        truncated = not terminated and self.day - self._first_day >= self.rules.episode_days
        return self._observation(), reward, terminated, truncated, self._info()

    def portfolio_value(self) -> float:
        """Return the value of cash and holdings at today's prices."""
        return self.cash + sum(units * price for units, price in zip(self.holdings, self._prices()))

    def _prices(self) -> list[float]:
        return [float(price) for price in self.market.prices[self.day]]

    def _observation(self) -> np.ndarray:
        value = self.portfolio_value()
        shares = [self.cash / value]
        shares += [units * price / value for units, price in zip(self.holdings, self._prices())]
        gain = math.log(value / self.rules.cash)
        indicators = self.market.indicators[self.day].ravel()
        return np.concatenate(([*shares, min(max(gain, -BOUND), BOUND)], indicators)).astype(np.float32)

    def _info(self) -> dict[str, Any]:
        return {"day": self.day, "portfolio_value": self.portfolio_value()}

    def _rebalance(self, weights: list[float]) -> None:
        prices = self._prices()
        held = [units * price for units, price in zip(self.holdings, prices)]
        value = _value_after_costs(self.portfolio_value(), weights, held, self.rules.cost)
        for index, price in enumerate(prices):
            bought = weights[index] * value - held[index]
            self.cash -= bought + self.rules.cost * abs(bought)
            self.holdings[index] = weights[index] * value / price
        self.cash = max(self.cash, 0.0)

    def _order(self, choices: list[int]) -> None:
        prices, cost = self._prices(), self.rules.cost
        portion = self.rules.trade_fraction * self.portfolio_value()
        for index, choice in enumerate(choices):
            if choice == SELL:
                units = min(portion / prices[index], self.holdings[index])
                self.holdings[index] -= units
                self.cash += units * prices[index] * (1 - cost)
        wanted = choices.count(BUY) * portion
        if not wanted:
            return
        part = min(1.0, self.cash / (wanted * (1 + cost)))
        for index, choice in enumerate(choices):
            if choice == BUY:
                self.holdings[index] += part * portion / prices[index]
                self.cash -= part * portion * (1 + cost)
        self.cash = max(self.cash, 0.0)

    def render(self) -> np.ndarray | None:
        """Draw portfolio value and an equal-weight portfolio over time, and below them the current allocation."""
        if self.render_mode is None:
            return None
        since = self.market.prices[self._first_day : self.day + 1] / self.market.prices[self._first_day]
        total = self.portfolio_value()
        shares = [self.cash / total] + [units * price / total for units, price in zip(self.holdings, self._prices())]
        return _picture(np.array(self._values) / self.rules.cash, since.mean(1), np.array(shares))


def _weights(targets: list[float]) -> list[float]:
    clipped = [min(max(target, 0.0), 1.0) for target in targets]
    total = max(sum(clipped), 1.0)
    return [target / total for target in clipped]


def _value_after_costs(value: float, weights: list[float], held: list[float], cost: float) -> float:
    """Solve u = value - cost · Σ |weight · u - held| for u.

    Given which instruments are bought and which are sold, the equation is linear. A wrong assignment understates the
    costs, so the right one has the smallest u. Sorted by held / weight, bought instruments come before sold ones.
    """
    by_need = sorted(range(len(held)), key=lambda index: held[index] / weights[index] if weights[index] else math.inf)
    smallest = math.inf
    for bought in range(len(held) + 1):
        signs = {index: 1 if place < bought else -1 for place, index in enumerate(by_need)}
        paid = sum(sign * held[index] for index, sign in signs.items())
        slope = sum(sign * weights[index] for index, sign in signs.items())
        smallest = min(smallest, (value + cost * paid) / (1 + cost * slope))
    return smallest


# -- the picture -------------------------------------------------------------------------------------------------------

_HEIGHT, _WIDTH, _CURVES, _MARGIN = 240, 320, 150, 8  # pixels; curves above, bars below
_PAPER, _LINE, _MARKET, _PORTFOLIO, _CASH = (
    (255, 255, 255),
    (220, 220, 220),
    (150, 150, 150),
    (30, 90, 200),
    (90, 160, 90),
)


def _picture(values: np.ndarray, market: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[_HEIGHT, _WIDTH, 3] uint8 with two curves that start at 1, and bars for cash and each instrument."""
    image = np.full((_HEIGHT, _WIDTH, 3), _PAPER, np.uint8)
    reach = max(np.abs(np.concatenate((values, market)) - 1).max(), 0.01)
    for curve, colour in ((np.ones(2), _LINE), (market, _MARKET), (values, _PORTFOLIO)):
        columns = np.arange(_MARGIN, _WIDTH - _MARGIN)
        heights = np.interp(columns, np.linspace(columns[0], columns[-1], len(curve)), curve)
        rows = np.round(_CURVES / 2 - (heights - 1) / reach * (_CURVES / 2 - _MARGIN)).astype(int)
        for column, before, row in zip(columns, [rows[0], *rows], rows):
            image[min(before, row) : max(before, row) + 2, column] = colour
    full = _HEIGHT - _CURVES - _MARGIN
    edges = np.linspace(_MARGIN, _WIDTH - _MARGIN, len(shares) + 1).round().astype(int)
    for index, share in enumerate(shares):
        top = _HEIGHT - _MARGIN - round(share * full)
        image[top : _HEIGHT - _MARGIN, edges[index] : edges[index + 1] - 1] = _PORTFOLIO if index else _CASH
    image[_HEIGHT - _MARGIN, _MARGIN : _WIDTH - _MARGIN] = _LINE
    return image
