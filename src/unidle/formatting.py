"""Numbers and times as text, the same in messages, in the terminal and on pages; unknown values are shown as –."""

from __future__ import annotations

import math
from collections.abc import Mapping

MISSING = "–"
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_FAULTS = {"exception": "exception or NaN", "killed": "worker killed", "hung": "worker hung"}


def short_number(value: float, digits: int = 3) -> str:
    """1_234_567 → 1.23M: `digits` significant digits, and a suffix from a thousand up."""
    rounded = float(f"{value:.{digits}g}")  # first, so that 999_999 becomes 1M and not 1000k
    if abs(rounded) >= 1e15:
        return _exponent(f"{rounded:.{digits}g}")
    for scale, suffix in _SUFFIXES:
        if abs(rounded) >= scale:
            return f"{_plain(rounded / scale)}{suffix}"
    return _plain(rounded)


def _plain(value: float) -> str:
    if value and abs(value) < 1e-3:
        return _exponent(f"{value:g}")
    return f"{value:.12g}"


def _exponent(text: str) -> str:
    """Shorten 2e-05 to 2e-5."""
    mantissa, mark, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if mark else text


def score(value: float) -> str:
    """A return, precise enough to compare two runs: 0.0123, 213.40, 1,204.5, 3.2M."""
    if abs(value) >= 1e6:
        return short_number(value, 4)
    if 0 < abs(value) < 0.1:
        return short_number(value)
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.2f}"


def outcome(mean: float, std: float | None, success: float | None) -> str:
    """The result of an evaluation, with as much as is known: 234.09 ± 27.65, success 71 %."""
    spread = "" if std is None else f" ± {score(std)}"
    return f"{score(mean)}{spread}" + ("" if success is None else f", success {percent(success)}")


def short_time(seconds: float) -> str:
    """A short time with its unit: 48 µs, 1.2 ms, 3.4 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def duration(seconds: float) -> str:
    """A time in its two largest units: 8.4 s, 4 min 05 s, 2 h 10 min, 1 d 3 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(share: float | None, decimals: int | None = None) -> str:
    """0.613 → 61 %; without `decimals`, a share below 10 % keeps one."""
    if share is None:
        return MISSING
    if decimals is None:
        decimals = 1 if 0 < share < 0.0995 else 0
    return f"{100 * share:.{decimals}f} %"


def apportion(shares: Mapping[str, float], total: int = 100) -> dict[str, int]:
    """Round shares of 1 to whole parts of `total`, so that they still sum to it: largest remainders are rounded up."""
    exact = {name: total * share for name, share in shares.items()}
    parts = {name: math.floor(value) for name, value in exact.items()}
    missing = round(sum(exact.values())) - sum(parts.values())
    for name in sorted(exact, key=lambda name: parts[name] - exact[name])[:missing]:
        parts[name] += 1
    return parts


def figure(value: float | None) -> str:
    """A sensor reading with about three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def faults(counts: Mapping[str, int]) -> str:
    """Counts by kind of fault: 4 × exception or NaN, 1 × worker killed."""
    kinds = sorted(counts, key=[*_FAULTS, *counts].index)  # in the same order everywhere
    return ", ".join(f"{counts[kind]:,} × {_FAULTS.get(kind, kind)}" for kind in kinds)
