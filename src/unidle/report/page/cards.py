"""Building blocks of the report page: series and sections of cards."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unidle.report.history import Record, number
from unidle.report.page.svg import Series

SMALL = (380, 270)  # chart size for three in a row


def series(name: str, records: Sequence[Record], key: str, x_key: str = "step", x_scale: float = 1.0) -> Series:
    """Return the series of one metric."""
    placed = [(x / x_scale, number(r, key)) for r in records if (x := number(r, x_key)) is not None]
    return Series(name, [x for x, _ in placed], [y for _, y in placed])


def section(title: str, remark: str, columns: str, cards: list[str], note: str = "") -> str:
    """Return a section: a heading with a remark, a note, and cards in `columns` (one, two, three)."""
    small = f"<small>{escape(remark)}</small>" if remark else ""
    above = f'<p class="note">{escape(note)}</p>\n' if note else ""
    inner = "\n".join(f'<div class="card">{card}</div>' for card in cards)
    return f'<section><h2>{title}{small}</h2>\n{above}<div class="grid {columns}">\n{inner}\n</div></section>'
