"""The rules of `unidle/Trading-v0`, implemented twice: on tensors for many portfolios, and in NumPy for one.

On day t the portfolio value is v = cash + Σ units · price. The action trades at the prices of day t, at a cost of
`cost` times the traded amount. On day t + 1 the portfolio value is v', and the reward is `reward_scale` · log(v' / v).
There is no short selling and no borrowing.

Continuous actions a in [-1, 1] are target weights: negative ones count as 0, and if their sum exceeds 1 they are
divided by it; the rest is cash. Weights apply to the value u after costs, which solves u = v - cost · Σ |w · u - held|.

Discrete actions are 0 sell, 1 hold, 2 buy for each instrument, each for `trade_fraction` of v. Sales come first,
limited to the holdings. If the cash does not cover all purchases and costs, all are scaled down by the same factor.

An episode starts in cash on a random day. It is truncated after `episode_days` steps, and terminates if v' falls below
`ruin` times the initial cash. The observation of day t is the share of cash, the share of each instrument, the log of v
over the initial cash, and the market's indicators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError
from unidle.tasks.trading.market import BOUND, INDICATORS, WARM_UP, Market, generated_market, read_market

SELL, HOLD, BUY = 0, 1, 2
_INSTRUMENTS, _DAYS, _SEED = 8, 25_200, 0  # of a generated market; policies overfit to ten years


@dataclass(frozen=True, eq=False)
class Rules:
    """The env_kwargs; UsageError if they are invalid."""

    data: str | Path | None = None
    """CSV or Parquet file of prices; None: a generated market."""
    instruments: int | None = None
    """Number of instruments of a generated market; None: 8."""
    days: int | None = None
    """Length of a generated market; None: 25200."""
    market_seed: int | None = None
    """Seed of a generated market; None: 0."""
    split: str = "train"
    """Part of the market to trade in: train, test or all."""
    split_date: Any = None
    """First day of the test part; None: the last fifth of the days."""
    actions: str = "continuous"
    """continuous: target weights; discrete: sell, hold or buy."""
    episode_days: int = 120
    """Steps per episode."""
    cost: float = 0.001
    """Transaction cost as a fraction of the traded amount."""
    cash: float = 1_000_000.0
    """Initial cash of an episode."""
    trade_fraction: float = 0.1
    """Size of a discrete trade as a fraction of the portfolio value."""
    ruin: float = 0.5
    """Fraction of the initial cash below which an episode terminates."""
    reward_scale: float = 100.0
    """With 100, a reward of 1 is a gain of about 1 %."""

    def __post_init__(self) -> None:
        if self.actions not in ("continuous", "discrete"):
            raise UsageError(f"actions is `{self.actions}`; use continuous or discrete.")
        for name in ("instruments", "days", "market_seed"):
            if getattr(self, name) is not None:
                if self.data is not None:
                    raise UsageError(f"{name} applies only to a generated market; leave it out with data.")
                _check_integer(name, getattr(self, name), 0 if name == "market_seed" else 1)
        _check_integer("episode_days", self.episode_days, 1)
        _check_number("cost", self.cost, 0 <= _number(self.cost) <= 0.1, "from 0 to 0.1")
        _check_number("cash", self.cash, _number(self.cash) > 0, "above 0")
        _check_number("ruin", self.ruin, 0 <= _number(self.ruin) < 1, "from 0 to below 1")
        _check_number("trade_fraction", self.trade_fraction, 0 < _number(self.trade_fraction) <= 1, "above 0, up to 1")
        _check_number("reward_scale", self.reward_scale, _number(self.reward_scale) > 0, "above 0")
        part, needed = self.market.part(self.split, self.split_date), self.episode_days + 1
        if not self.starts:
            raise UsageError(
                f"The part `{self.split}` has {len(part)} days, but an episode needs {needed} from day {WARM_UP} of "
                "the market on; lower episode_days, move split_date, or use more days."
            )

    @cached_property
    def market(self) -> Market:
        """The market: read from `data` or generated."""
        if self.data is not None:
            return read_market(self.data)
        given = (self.instruments, self.days, self.market_seed)
        return generated_market(*(own if one is None else one for one, own in zip(given, (_INSTRUMENTS, _DAYS, _SEED))))

    @cached_property
    def starts(self) -> range:
        """Days on which an episode can start: indicators are known, and its last day is in the part."""
        part = self.market.part(self.split, self.split_date)
        return range(max(part.start, WARM_UP), part.stop - self.episode_days)

    @property
    def observation_space(self) -> spaces.Box:
        """Share of cash, shares of instruments, log of relative value, then the indicators of each instrument."""
        instruments = len(self.market.names)
        return spaces.Box(-BOUND, BOUND, (2 + instruments + instruments * INDICATORS,), np.float32)

    @property
    def action_space(self) -> spaces.Space:
        """One action per instrument."""
        instruments = len(self.market.names)
        if self.actions == "discrete":
            return spaces.MultiDiscrete([3] * instruments)
        return spaces.Box(-1.0, 1.0, (instruments,), np.float32)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else np.nan


def _check_number(name: str, value: Any, is_valid: bool, range_: str) -> None:
    if not is_valid or not np.isfinite(value):
        raise UsageError(f"{name} is {value!r}; use a number {range_}.")


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}; use an integer of at least {least}.")
