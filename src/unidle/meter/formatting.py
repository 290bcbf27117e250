"""How the meter words a share and a reading; what is not known is a –."""

from __future__ import annotations

LACKING = "–"


def percent(share: float | None, decimals: int = 0) -> str:
    """0.613 → 61 %, with as many decimals everywhere in a column."""
    return LACKING if share is None else f"{100 * share:.{decimals}f} %"


def figure(value: float | None) -> str:
    """Three digits or so: a reading has no more."""
    if value is None:
        return LACKING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
