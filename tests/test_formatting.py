"""Numbers as text: returns, and shares that are rounded together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.formatting import apportion, outcome


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [(-0.0123, 0.00456, "-0.0123 ± 0.00456"), (0.0, 0.0, "0.00 ± 0.00"), (213.4, 7.25, "213.40 ± 7.25")],
)
def test_small_returns_keep_three_significant_digits(mean: float, std: float, text: str) -> None:
    assert outcome(mean, std, None) == text


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=12).filter(lambda seconds: sum(seconds) > 1e-3))
def test_rounded_shares_sum_to_100_and_are_off_by_less_than_one(seconds: list[float]) -> None:
    shares = {str(i): value / sum(seconds) for i, value in enumerate(seconds)}
    rounded = apportion(shares)
    assert sum(rounded.values()) == 100
    assert [rounded[name] for name in shares] == pytest.approx([100 * share for share in shares.values()], abs=1)


def test_largest_remainder_is_rounded_up() -> None:
    assert apportion({"a": 0.614, "b": 0.253, "c": 0.133}) == {"a": 62, "b": 25, "c": 13}
