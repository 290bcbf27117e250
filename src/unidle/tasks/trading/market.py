"""Daily prices of many instruments, read from a file or generated, and indicators computed from them."""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from unidle.errors import UsageError

RETURNS = (1, 5, 20, 60)  # horizons of the returns, in days
VOLATILITY_DAYS = 20
AVERAGE_DAYS = 50
INDICATORS = len(RETURNS) + 2
WARM_UP = max(*RETURNS, VOLATILITY_DAYS, AVERAGE_DAYS - 1)  # the first day with all indicators
BOUND = 10.0  # clips indicators, which are of order 1, so that an extreme day does not dominate
_TYPICAL_VOLATILITY, _MIN_VOLATILITY = 0.01, 1e-6  # per day
_TRAIN_SHARE = 0.8
_FORMAT = "the first column must be the date, followed by one column of prices per instrument"


@dataclass(frozen=True, eq=False)
class Market:
    """T days of K instruments."""

    names: tuple[str, ...]  # [K]
    dates: np.ndarray  # [T] datetime64[s], ascending
    prices: np.ndarray  # [T, K] float64, finite and above 0

    @cached_property
    def indicators(self) -> np.ndarray:
        """[T, K, INDICATORS] float32, computed from prices up to each day; NaN before WARM_UP."""
        return indicators(self.prices)

    def part(self, split: str, split_date: Any = None) -> range:
        """The days of "train", "test" (from `split_date` on, or the last fifth) or "all"."""
        days = len(self.dates)
        cut = int(_TRAIN_SHARE * days)
        if split_date is not None:
            first = _as_date(split_date)
            if first is None:
                raise UsageError(f"split_date is `{split_date}`; write it as 2020-01-31.")
            cut = int(np.searchsorted(self.dates, first))
        parts = {"train": range(cut), "test": range(cut, days), "all": range(days)}
        if split not in parts:
            raise UsageError(f"split is `{split}`; use train, test or all.")
        return parts[split]


def indicators(prices: np.ndarray) -> np.ndarray:
    """Returns, volatility and distance from the moving average [T, K, INDICATORS] of prices [T, K].

    Returns and distance are scaled by recent volatility, so that they are of order 1 for any instrument and any bar
    length.
    """
    days, instruments = prices.shape
    table = np.full((days, instruments, INDICATORS), np.nan, np.float32)
    if days <= WARM_UP:
        return table
    logs = np.log(prices)
    squares = np.diff(logs, axis=0) ** 2
    volatility = np.maximum(np.sqrt(_trailing_mean(squares, VOLATILITY_DAYS)), _MIN_VOLATILITY)
    average = _trailing_mean(prices, AVERAGE_DAYS)
    known = days - WARM_UP
    volatility, average, now = volatility[-known:], average[-known:], logs[-known:]
    columns = [(now - logs[WARM_UP - n : days - n]) / (volatility * math.sqrt(n)) for n in RETURNS]
    columns.append(np.log(volatility / _TYPICAL_VOLATILITY))
    columns.append((now - np.log(average)) / (volatility * math.sqrt(AVERAGE_DAYS)))
    table[WARM_UP:] = np.clip(np.stack(columns, -1), -BOUND, BOUND)
    return table


def _trailing_mean(values: np.ndarray, days: int) -> np.ndarray:
    """Mean over the last `days` days; without the first days - 1."""
    return np.lib.stride_tricks.sliding_window_view(values, days, axis=0).mean(-1)


# -- from a file -------------------------------------------------------------------------------------------------------


def read_market(file: str | Path) -> Market:
    """Read a CSV or Parquet file; UsageError if it is invalid."""
    path = Path(file)
    if path.suffix.lower() not in _READERS:
        raise UsageError(f"{path} is neither .csv nor .parquet; save the prices as one of them.")
    if not path.is_file():
        raise UsageError(f"There is no file {path}; check the path given as data.")
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)  # the environments of one process share it
def _read(path: Path, changed: int, size: int) -> Market:
    rows = _READERS[path.suffix.lower()](path)
    if not rows:
        raise UsageError(f"{path} is empty; {_FORMAT}.")
    names, rows = [str(name).strip() for name in rows[0][1:]], rows[1:]
    _check_names(path, names)
    if not rows:
        raise UsageError(f"{path} has no days; {_FORMAT}.")
    dates = np.empty(len(rows), "datetime64[s]")
    prices = np.empty((len(rows), len(names)))
    for index, row in enumerate(rows):
        where = f"{path}, row {index + 1}"
        if len(row) != len(names) + 1:
            raise UsageError(f"{where} has {len(row)} cells, the header has {len(names) + 1}; {_FORMAT}.")
        day = _as_date(row[0])
        if day is None:
            raise UsageError(f"{where}: `{row[0]}` is not a date; write it as 2020-01-31.")
        if index and day <= dates[index - 1]:
            raise UsageError(
                f"{where}: {row[0]} is not later than the row above it; sort the days and remove duplicates."
            )
        dates[index] = day
        prices[index] = [_as_price(cell) for cell in row[1:]]
        for column in np.flatnonzero(np.isnan(prices[index]))[:1]:
            cell = f"`{row[1 + column]}`" if row[1 + column] not in ("", None) else "empty"
            raise UsageError(
                f"{where} ({row[0]}), column `{names[column]}` is {cell}, not a positive price; fix or remove the row."
            )
    return _make_market(names, dates, prices)


def _check_names(path: Path, names: list[str]) -> None:
    if not names:
        raise UsageError(f"{path} has no instruments; {_FORMAT}.")
    for index, name in enumerate(names):
        if not name:
            raise UsageError(f"{path}: column {index + 2} has no name; name every instrument.")
        if name in names[:index]:
            raise UsageError(f"{path} has two columns `{name}`; instrument names must be unique.")


def _as_price(cell: Any) -> float:
    """Parse a positive finite price; NaN otherwise."""
    try:
        price = float(cell)
    except (TypeError, ValueError):
        return math.nan
    return price if math.isfinite(price) and price > 0 else math.nan


def _as_date(given: Any) -> np.datetime64 | None:
    """Parse a date or ISO text without time zone; None otherwise."""
    if isinstance(given, date):  # or a datetime, its subclass
        parsed = given
    else:
        try:
            parsed = datetime.fromisoformat(str(given).strip())
        except ValueError:
            return None
    if isinstance(parsed, datetime) and parsed.tzinfo is not None:
        return None
    return np.datetime64(parsed, "s")


def _read_csv(path: Path) -> list[list[Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.reader(file) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as CSV ({error}); save it as CSV in UTF-8.") from None


def _read_parquet(path: Path) -> list[list[Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{path} needs the package pyarrow; run: pip install pyarrow.") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read as Parquet ({reason}); save it again, or as CSV.") from None
    columns = [column.to_pylist() for column in table.columns]
    return [list(table.column_names), *(list(row) for row in zip(*columns))]


_READERS: dict[str, Callable[[Path], list[list[Any]]]] = {".csv": _read_csv, ".parquet": _read_parquet}


# -- generated ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regime:
    """A market regime, which applies to all instruments."""

    drift: float  # per day
    volatility: float  # per day
    correlation: float  # of any two instruments
    days: float  # mean duration


# Long bull markets, quiet periods, and short crashes with high correlation; the market rises overall.
REGIMES = (
    Regime(0.0010, 0.009, 0.3, 100),
    Regime(0.0000, 0.006, 0.1, 50),
    Regime(-0.0020, 0.020, 0.7, 25),
)
_DRIFT_DEVIATION = 0.0005  # standard deviation of an instrument's drift around its regime's
_VOLATILITY_RANGE = (0.7, 1.3)  # an instrument's volatility relative to its regime's


@lru_cache(maxsize=4)  # the environments of one process share it
def generated_market(instruments: int, days: int, seed: int) -> Market:
    """Geometric Brownian motion whose drift, volatility and correlation follow a hidden Markov chain of regimes."""
    if instruments < 1 or days < 1 or seed < 0:
        raise UsageError(
            f"A market of {instruments} instruments over {days} days with seed {seed} is not possible; "
            "use at least one instrument and one day, and a seed of at least 0."
        )
    rng = np.random.default_rng(seed)
    regime = _regimes(days, rng)
    drift_offset = rng.normal(0.0, _DRIFT_DEVIATION, (len(REGIMES), instruments))
    drift = np.array([each.drift for each in REGIMES])[regime, None] + drift_offset[regime]
    volatility = np.array([each.volatility for each in REGIMES])[regime, None] * rng.uniform(
        *_VOLATILITY_RANGE, instruments
    )
    correlation = np.array([each.correlation for each in REGIMES])[regime, None]
    common, own = rng.standard_normal((days, 1)), rng.standard_normal((days, instruments))
    shocks = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    returns = drift - volatility**2 / 2 + volatility * shocks
    returns[0] = 0.0
    dates = np.busday_offset(np.datetime64("2000-01-03"), np.arange(days), roll="forward").astype("datetime64[s]")
    names = [f"instrument {index}" for index in range(instruments)]
    return _make_market(names, dates, 100 * np.exp(np.cumsum(returns, axis=0)))


def _regimes(days: int, rng: np.random.Generator) -> np.ndarray:
    """[T] the regime of each day; all other regimes are equally likely to follow."""
    regime = np.zeros(days, np.int64)
    leaves, turns = rng.random(days), rng.integers(1, len(REGIMES), days)
    for day in range(1, days):
        left = leaves[day] < 1 / REGIMES[regime[day - 1]].days
        regime[day] = (regime[day - 1] + left * turns[day]) % len(REGIMES)
    return regime


def _make_market(names: list[str], dates: np.ndarray, prices: np.ndarray) -> Market:
    """Return a market with read-only arrays, because it is shared."""
    dates.flags.writeable = prices.flags.writeable = False
    return Market(tuple(names), dates, prices)
