"""How numbers and times are worded, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping

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
    """A return, precise enough to compare two runs: 213.40, 1,204.5, 3.2M."""
    if abs(value) >= 1e6:
        return short_number(value, 4)
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.2f}"


def outcome(mean: float, std: float | None, success: float | None) -> str:
    """A mean return, and what else is known of an evaluation: 234.09 ± 27.65, success 71 %."""
    spread = "" if std is None else f" ± {score(std)}"
    return f"{score(mean)}{spread}" + ("" if success is None else f", success {percent(success)}")


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


def percent(share: float) -> str:
    """0.613 → 61 %; what is small but there keeps a decimal."""
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def faults(counts: Mapping[str, int]) -> str:
    """Counts by kind of fault: 4 × exception or NaN, 1 × worker killed."""
    kinds = sorted(counts, key=[*_FAULTS, *counts].index)  # in the same order everywhere
    return ", ".join(f"{counts[kind]:,} × {_FAULTS.get(kind, kind)}" for kind in kinds)
