"""Market data: CSV and Parquet files, their errors, splits, indicators without lookahead, generated markets."""

from __future__ import annotations

import datetime
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidle.errors import UsageError
from unidle.tasks.trading.market import (
    AVERAGE_DAYS,
    BOUND,
    INDICATORS,
    REGIMES,
    RETURNS,
    VOLATILITY_DAYS,
    WARM_UP,
    generated_market,
    indicators,
    read_market,
)

GOOD = "date,A,B\n2020-01-01,1.5,200\n2020-01-02,1.25,1e2\n2020-01-03,3,0.01\n"


def write_prices(folder: Path, text: str, name: str = "prices.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [GOOD, "\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD.replace("\n", "\n\n"), GOOD.replace(",A", ", A ")]
)
def test_csv_is_read_exactly(tmp_path: Path, text: str) -> None:
    market = read_market(write_prices(tmp_path, text))
    assert market.names == ("A", "B")
    assert market.dates.astype("datetime64[D]").astype(str).tolist() == ["2020-01-01", "2020-01-02", "2020-01-03"]
    assert market.prices.tolist() == [[1.5, 200.0], [1.25, 100.0], [3.0, 0.01]]
    assert market.prices.dtype == np.float64


def test_dates_may_include_times(tmp_path: Path) -> None:
    market = read_market(write_prices(tmp_path, "time,A\n2020-01-01T09:00,1\n2020-01-01T10:00,2\n"))
    assert market.dates[1] - market.dates[0] == np.timedelta64(3600, "s")


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    before = read_market(write_prices(tmp_path, GOOD))
    assert read_market(tmp_path / "prices.csv") is before
    assert read_market(write_prices(tmp_path, GOOD.replace("1.5", "1.75"))).prices[0, 0] == 1.75


def test_shared_prices_are_read_only(tmp_path: Path) -> None:
    for market in (read_market(write_prices(tmp_path, GOOD)), generated_market(2, 10, 0)):
        with pytest.raises(ValueError, match="read-only"):
            market.prices[0, 0] = 1.0


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["is empty"]),
        ("date\n2020-01-01\n", ["no instruments"]),
        ("date,A\n", ["no days"]),
        ("date,A,A\n2020-01-01,1,2\n", ["two columns `A`"]),
        ("date,A,\n2020-01-01,1,2\n", ["column 3 has no name"]),
        ("date,A,B\n2020-01-01,1,2\n2020-01-02,1\n", ["row 2 has 2 cells, the header has 3"]),
        ("date,A\n2020-01-01,1\n2020-01-02,1,7\n", ["row 2 has 3 cells, the header has 2"]),
        ("date,A\n2020-01-01,1\n01/02/2020,1\n", ["row 2", "`01/02/2020` is not a date"]),
        ("date,A\n2020-01-01,1\n,1\n", ["row 2", "is not a date"]),
        ("date,A\n2020-01-01T00:00+01:00,1\n", ["row 1", "is not a date"]),
        ("date,A\n2020-01-02,1\n2020-01-01,1\n", ["row 2", "2020-01-01", "is not later than"]),
        ("date,A\n2020-01-02,1\n2020-01-02,1\n", ["row 2", "is not later than"]),
        *(
            (f"date,A,B\n2020-01-01,1,2\n2020-01-02,1,{price}\n", ["row 2 (2020-01-02)", "column `B`", shown])
            for price, shown in {
                "nan": "`nan`",
                "": "empty",
                "0": "`0`",
                "-3.5": "`-3.5`",
                "inf": "`inf`",
                "1e999": "`1e999`",
                "n/a": "`n/a`",
            }.items()
        ),
    ],
)
def test_malformed_csv_error_is_one_sentence_with_location(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = write_prices(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_market(path)
    message = str(error.value)
    for fragment in [str(path), *fragments]:
        assert fragment in message
    assert "\n" not in message
    assert message.endswith(".")


def test_missing_or_unsupported_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*none\.csv"):
        read_market(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UsageError, match="no file"):
        read_market(tmp_path / "folder.csv")
    with pytest.raises(UsageError, match=r"neither \.csv nor \.parquet"):
        read_market(write_prices(tmp_path, GOOD, "prices.xlsx"))
    (tmp_path / "latin.csv").write_bytes("date,Börse\n2020-01-01,1\n".encode("latin-1"))
    with pytest.raises(UsageError, match="UTF-8"):
        read_market(tmp_path / "latin.csv")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        read_market(write_prices(tmp_path, "", "prices.parquet"))


@pytest.mark.parametrize("dates", ["text", "date", "timestamp"])
def test_parquet_gives_the_same_market_as_csv(tmp_path: Path, dates: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days: list[Any] = [datetime.datetime(2020, 1, day) for day in (1, 2, 3)]
    if dates != "timestamp":
        days = [day.date() if dates == "date" else str(day.date()) for day in days]
    kind = {"text": arrow.string(), "date": arrow.date32(), "timestamp": arrow.timestamp("ns")}[dates]
    table = arrow.table(
        {"date": arrow.array(days, kind), "A": [1.5, 1.25, 3.0], "B": arrow.array([200, 100, 1], arrow.int32())}
    )
    parquet.write_table(table, tmp_path / "prices.parquet")
    market, same = (
        read_market(tmp_path / "prices.parquet"),
        read_market(write_prices(tmp_path, GOOD.replace("0.01", "1"))),
    )
    assert market.names == same.names
    assert np.array_equal(market.dates, same.dates)
    assert np.array_equal(market.prices, same.prices)


def test_malformed_parquet_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        read_market(write_prices(tmp_path, "not parquet", "bad.parquet"))
    parquet.write_table(arrow.table({"date": ["2020-01-01"], "A": [None]}), tmp_path / "null.parquet")
    with pytest.raises(UsageError, match=r"row 1 \(2020-01-01\), column `A` is empty"):
        read_market(tmp_path / "null.parquet")


# -- splits ------------------------------------------------------------------------------------------------------------


def test_splits_meet_at_the_split_date_without_overlap() -> None:
    market = generated_market(2, 100, 0)
    split_day = market.dates[70]
    for date in (str(split_day), str(split_day)[:10], split_day.astype(datetime.datetime).date()):
        train, test = market.part("train", date), market.part("test", date)
        assert (train, test) == (range(70), range(70, 100))
        assert market.part("all", date) == range(100)
    # Split on a Saturday: Friday is the last training day, Monday the first test day.
    friday = next(day for day in range(50, 60) if market.dates[day + 1] - market.dates[day] > np.timedelta64(1, "D"))
    saturday = market.dates[friday] + np.timedelta64(1, "D")
    assert market.part("train", str(saturday)) == range(friday + 1)


def test_default_split_trains_on_the_first_four_fifths() -> None:
    market = generated_market(2, 99, 0)
    assert (market.part("train"), market.part("test")) == (range(79), range(79, 99))


@pytest.mark.parametrize(
    ("split", "date", "message"), [("dev", None, "train, test or all"), ("train", "May", "2020-01-31")]
)
def test_unknown_split_or_date_is_refused(split: str, date: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generated_market(2, 99, 0).part(split, date)


# -- indicators --------------------------------------------------------------------------------------------------------


def random_prices(seed: int, days: int = WARM_UP + 20, instruments: int = 3) -> np.ndarray:
    returns = np.random.default_rng(seed).normal(0, 0.02, (days, instruments))
    return 50 * np.exp(np.cumsum(returns, axis=0))


def test_indicators_match_their_definitions() -> None:
    prices = random_prices(0)
    found = indicators(prices)
    assert found.shape == (*prices.shape, INDICATORS)
    assert found.dtype == np.float32
    assert np.isnan(found[:WARM_UP]).all()
    for day in range(WARM_UP, len(prices)):
        for k in range(prices.shape[1]):
            history = prices[: day + 1, k]
            steps = [math.log(b / a) for a, b in zip(history[-VOLATILITY_DAYS - 1 :], history[-VOLATILITY_DAYS:])]
            volatility = math.sqrt(sum(step**2 for step in steps) / len(steps))
            expected = [math.log(history[-1] / history[-1 - n]) / (volatility * math.sqrt(n)) for n in RETURNS]
            average = sum(history[-AVERAGE_DAYS:]) / AVERAGE_DAYS
            expected.append(math.log(volatility / 0.01))
            expected.append(math.log(history[-1] / average) / (volatility * math.sqrt(AVERAGE_DAYS)))
            np.testing.assert_allclose(found[day, k], expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, WARM_UP + 18), st.floats(0.01, 100))
def test_indicators_do_not_look_ahead(seed: int, day: int, factor: float) -> None:
    prices = random_prices(seed)
    other = prices.copy()
    other[day + 1 :] = random_prices(seed + 1)[day + 1 :] * factor
    before, after = indicators(prices), indicators(other)
    assert np.array_equal(before[: day + 1], after[: day + 1], equal_nan=True)
    if day + 1 >= WARM_UP:
        assert not np.array_equal(before[day + 1], after[day + 1])


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_indicators_are_of_order_one_at_any_price_scale(scale: float) -> None:
    prices = generated_market(4, 1000, 5).prices
    found = indicators(prices * scale)[WARM_UP:]
    np.testing.assert_allclose(found, indicators(prices)[WARM_UP:], atol=1e-3)
    assert (np.abs(found.mean((0, 1))) < 1).all()
    assert (found.std((0, 1)) > 0.2).all()
    assert (found.std((0, 1)) < 2).all()


def test_indicators_are_finite_for_constant_and_jumping_prices() -> None:
    prices = np.ones((WARM_UP + 5, 3))
    prices[-1, 1] = 1e9
    prices[-30:, 2] = 1e9  # a jump outside the volatility window but inside the longest return's
    found = indicators(prices)[WARM_UP:]
    assert np.isfinite(found).all()
    assert np.abs(found).max() == BOUND
    assert (found[:, 0, : len(RETURNS)] == 0).all()


def test_indicators_are_nan_during_the_warm_up() -> None:
    assert np.isnan(indicators(random_prices(0, WARM_UP))).all()
    assert np.isfinite(indicators(random_prices(0, WARM_UP + 1))[-1]).all()


# -- generated markets -------------------------------------------------------------------------------------------------


def test_generated_market_is_reproducible_from_its_seed() -> None:
    first = generated_market(3, 200, 7)
    generated_market.cache_clear()
    again, other = generated_market(3, 200, 7), generated_market(3, 200, 8)
    assert again is not first
    assert np.array_equal(first.prices, again.prices)
    assert not np.isclose(first.prices[1:], other.prices[1:]).any(axis=1).all()
    assert first.prices.shape == (200, 3)
    assert (first.prices[0] == 100).all()
    assert len(set(first.names)) == 3
    assert (np.diff(first.dates) > np.timedelta64(0, "s")).all()
    assert np.is_busday(first.dates.astype("datetime64[D]")).all()


def test_regimes_persist_and_differ_in_volatility_and_correlation() -> None:
    returns = np.diff(np.log(generated_market(20, 20_000, 1).prices), axis=0)
    calm = min(each.volatility for each in REGIMES)
    wild = max(REGIMES, key=lambda each: each.volatility)
    spread = returns.std(1)  # across instruments, per day
    assert np.corrcoef(spread[:-1], spread[1:])[0, 1] > 0.5
    months = returns[: len(returns) // 20 * 20].reshape(-1, 20, 20)
    volatility = np.sqrt((months**2).mean((1, 2)))
    assert np.quantile(volatility, 0.02) == pytest.approx(calm, rel=0.25)
    assert np.quantile(volatility, 0.98) == pytest.approx(wild.volatility, rel=0.25)
    correlations = [
        np.corrcoef(months[days].reshape(-1, 20).T)[np.triu_indices(20, 1)].mean()
        for days in calmest_and_wildest(volatility)
    ]
    assert correlations[1] > correlations[0] + 0.3


def calmest_and_wildest(volatility: np.ndarray) -> list[np.ndarray]:
    """Indices of the tenth with the lowest and the tenth with the highest volatility."""
    order, tenth = np.argsort(volatility), len(volatility) // 10
    return [order[:tenth], order[-tenth:]]


def test_generated_market_has_positive_drift() -> None:
    growth = [np.log(generated_market(10, 10_000, seed).prices[-1] / 100).mean() / 10_000 for seed in range(5)]
    assert 0.00005 < np.mean(growth) < 0.0006


@pytest.mark.parametrize(("instruments", "days", "seed"), [(0, 10, 0), (1, 0, 0), (1, 10, -1)])
def test_invalid_generated_market_is_refused(instruments: int, days: int, seed: int) -> None:
    with pytest.raises(UsageError, match="at least one"):
        generated_market(instruments, days, seed)
