"""Building blocks of the report pages: series, heading, key figures, sections of cards, settings as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import yaml

from unidle.config.fields import word_for_none
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


def heading(brand: str, title: str, facts: Mapping[str, Any]) -> str:
    """Return the page's heading; facts that are None are left out."""
    shown = "".join(
        f"<span>{name} <b>{escape(str(value))}</b></span>" for name, value in facts.items() if value is not None
    )
    return f'<header><div class="brand">{brand}</div><h1>{escape(title)}</h1><p class="facts">{shown}</p></header>'


def key_figures(figures: Sequence[tuple[str, str, str]]) -> str:
    """Return the table of key figures: name, value and detail of each."""
    cells = "".join(
        f'<div><dt>{name}</dt><dd class="value">{escape(value)}</dd><dd class="detail">{escape(detail)}</dd></div>'
        for name, value, detail in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def setting_text(name: str, value: Any) -> str:
    """Return a setting's value as a user writes it: YAML on one line, or a word for None (auto, off)."""
    if value is None:
        return word_for_none(name)
    if isinstance(value, str):
        return value  # without the quotes that YAML needs around `off`
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
