"""The rules of `unidle/Trading-v0`, which two versions keep to: tensors for many at once, and NumPy for one.

On day t the portfolio is worth v = cash + Σ units · price. The action trades at the prices of day t and costs `cost`
times the money that changes hands; then it is day t + 1, the portfolio is worth v', and the reward is
`reward_scale` · log(v' / v). Nothing can be sold that is not held, and nothing bought that cash does not pay for.

Continuous actions a in [-1, 1] are target weights: those above 0, divided by their sum where it is over 1; cash is the
rest. The weights are of what is left after costs: the worth u after trading solves u = v - cost · Σ |w · u - held|.

Discrete actions are 0 sell, 1 hold, 2 buy for each instrument, `trade_fraction` of v each. Sales come first, of what is
held at most; purchases then share the cash there is, alike, where it is too little for all of them and their costs.

An episode starts in cash on a random day. It is truncated after `episode_days` steps, and terminates where v' falls
below `ruin` of the first cash. What is seen is the share of cash, those of the instruments, the log of v over the first
cash, and the market's indicators, all of day t.
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
_INSTRUMENTS, _DAYS, _SEED = 8, 25_200, 0  # of a generated market: a policy learns ten years of it by heart


@dataclass(frozen=True, eq=False)
class Rules:
    """What can be chosen, as env_kwargs; UsageError if it cannot be played."""

    data: str | Path | None = None
    """CSV or Parquet file of prices; none: a generated market."""
    instruments: int | None = None
    """Of a generated market: how many; none: 8."""
    days: int | None = None
    """Of a generated market: how long; none: 25200."""
    market_seed: int | None = None
    """Of a generated market; none: 0."""
    split: str = "train"
    """Days to play on: train, test or all."""
    split_date: Any = None
    """The first day of the test part; none: the last fifth of the days."""
    actions: str = "continuous"
    """continuous: target weights; discrete: sell, hold or buy."""
    episode_days: int = 120
    """Steps of an episode."""
    cost: float = 0.001
    """Of a trade, as a part of its money."""
    cash: float = 1_000_000.0
    """At the start of an episode."""
    trade_fraction: float = 0.1
    """Discrete actions: what one buys or sells, as a part of the portfolio's worth."""
    ruin: float = 0.5
    """The part of the first cash below which an episode terminates."""
    reward_scale: float = 100.0
    """100: a reward of 1 is about one per cent."""

    def __post_init__(self) -> None:
        if self.actions not in ("continuous", "discrete"):
            raise UsageError(f"actions is `{self.actions}`; it can be continuous or discrete.")
        for name in ("instruments", "days", "market_seed"):
            if getattr(self, name) is not None:
                if self.data is not None:
                    raise UsageError(f"{name} is that of a generated market; leave it out where data is given.")
                _check_whole(name, getattr(self, name), 0 if name == "market_seed" else 1)
        _check_whole("episode_days", self.episode_days, 1)
        _check_number("cost", self.cost, 0 <= _number(self.cost) <= 0.1, "from 0 to 0.1")
        _check_number("cash", self.cash, _number(self.cash) > 0, "above 0")
        _check_number("ruin", self.ruin, 0 <= _number(self.ruin) < 1, "from 0 to below 1")
        _check_number("trade_fraction", self.trade_fraction, 0 < _number(self.trade_fraction) <= 1, "above 0, up to 1")
        _check_number("reward_scale", self.reward_scale, _number(self.reward_scale) > 0, "above 0")
        part, needed = self.market.part(self.split, self.split_date), self.episode_days + 1
        if not self.starts:
            raise UsageError(
                f"The part `{self.split}` has {len(part)} days, and an episode needs {needed} days from day {WARM_UP} "
                "of the market on; lower episode_days, move split_date, or give more days."
            )

    @cached_property
    def market(self) -> Market:
        """What is traded."""
        if self.data is not None:
            return read_market(self.data)
        given = (self.instruments, self.days, self.market_seed)
        return generated_market(*(own if one is None else one for one, own in zip(given, (_INSTRUMENTS, _DAYS, _SEED))))

    @cached_property
    def starts(self) -> range:
        """Days on which an episode can begin: indicators are known, and its last day is in the part."""
        part = self.market.part(self.split, self.split_date)
        return range(max(part.start, WARM_UP), part.stop - self.episode_days)

    @property
    def observation_space(self) -> spaces.Box:
        """Share of cash, shares of the instruments, log of the worth, indicators instrument by instrument."""
        instruments = len(self.market.names)
        return spaces.Box(-BOUND, BOUND, (2 + instruments + instruments * INDICATORS,), np.float32)

    @property
    def action_space(self) -> spaces.Space:
        """One number for each instrument."""
        instruments = len(self.market.names)
        if self.actions == "discrete":
            return spaces.MultiDiscrete([3] * instruments)
        return spaces.Box(-1.0, 1.0, (instruments,), np.float32)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else np.nan


def _check_number(name: str, value: Any, is_right: bool, range_: str) -> None:
    if not is_right or not np.isfinite(value):
        raise UsageError(f"{name} is {value!r}; give a number {range_}.")


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}; give a whole number from {least} on.")
