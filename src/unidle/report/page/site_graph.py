"""The report's drawing of an episode on a website: the visited pages, their order and their relevance.

It is drawn from a small file that an evaluation writes to the run folder. Its content comes from a website, so it is
validated and escaped.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unidle.engine.evaluate.episode_trace import TRACE_FILE
from unidle.formatting import short_number
from unidle.report.page.cards import section
from unidle.report.page.graph_layout import fit_to_box, halo, layout_pages

SIZE = (1100, 620)
_MAX_PAGES, _MAX_LINKS, _MAX_URL = 120, 4000, 300  # limits for untrusted files
_TOP, _BOTTOM, _MARGIN = 76.0, 566.0, 8.0  # the graph's area; the strip of visits is below it
_KINDS = {  # class → legend entry
    "found": "about the topic",
    "other": "off topic",
    "failed": "failed",
    "duplicate": "duplicate",
    "unvisited": "linked, not visited",
}
_STATES = {"fetched": "other", "failed": "failed", "duplicate": "duplicate"}
_CSS = """
.pages .tree { fill: none; stroke: var(--axis); stroke-width: 1.5; }
.pages .link { stroke: var(--axis); stroke-width: .6; stroke-opacity: .45; }
.pages .walk { fill: none; stroke: var(--accent); stroke-width: 1.1; stroke-opacity: .38; stroke-dasharray: 3 3; }
.pages .found { --c: var(--c2); } .pages .other { --c: var(--c5); } .pages .failed { --c: var(--c1); }
.pages .duplicate { --c: var(--c4); } .pages .unvisited { --c: var(--axis); }
.pages .page { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.pages .start { fill: none; stroke: var(--ink); stroke-width: 1.5; }
.pages text.visit { fill: var(--card); font-weight: 650; text-anchor: middle; }
.pages .spot:hover .page { stroke: var(--ink); }
"""


@dataclass(frozen=True)
class _Page:
    """A visited page."""

    url: str
    kind: str  # of `_KINDS`
    relevance: float
    parent: int  # the visit whose page was the first to link to it; -1: none
    others: int  # pages first linked from here and never visited


@dataclass(frozen=True)
class _Episode:
    """An episode."""

    step: int
    pages: list[_Page]  # in the order of the walk
    links: list[tuple[int, int]]  # between them
    known: int
    visited: int  # pages in total; `pages` has the first ones


def site_graph_section(folder: Path) -> str:
    """Return the last episode recorded by an evaluation; empty if there is none."""
    episode = _read(folder / TRACE_FILE)
    if episode is None:
        return ""
    where = f"the first episode of the evaluation at step {short_number(episode.step)}: {episode.pages[0].url}"
    return section("Pages", where, "one", [site_graph(episode)])


def site_graph(episode: _Episode) -> str:
    """Return an `<svg>` of the pages with their unvisited links around them, and the walk below."""
    halos = np.array([halo(page.others) for page in episode.pages])
    parents = np.array([page.parent for page in episode.pages])
    places, scale = fit_to_box(
        layout_pages(parents, halos, episode.links), halos, (_MARGIN, _TOP, SIZE[0] - _MARGIN, _BOTTOM)
    )
    body = [f"<style>{_CSS}</style>", _head(episode)]
    body += [_lines(episode, places), _walked(places)]
    body += [_unvisited(page, place, scale) for page, place in zip(episode.pages, places)]
    body += [_visit(number, page, place, scale) for number, (page, place) in enumerate(zip(episode.pages, places))]
    body.append(_strip(episode))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart pages" viewBox="0 0 {SIZE[0]} {SIZE[1]}" '
        f'role="img" aria-label="Pages of an episode">{"".join(body)}</svg>'
    )


# -- drawing ----------------------------------------------------------------------------------------------------------


def _head(episode: _Episode) -> str:
    found = sum(page.kind == "found" for page in episode.pages)
    more = f" (the first {len(episode.pages)} are shown)" if episode.visited > len(episode.pages) else ""
    title = (
        f"{found} of {len(episode.pages)} visited pages are about the topic; {episode.known:,} pages are known{more}"
    )
    parts, x = [f'<text class="chart-title" x="2" y="17">{escape(title)}</text>'], 8.0
    for kind, name in _KINDS.items():
        radius = 2.4 if kind == "unvisited" else 5.5
        parts.append(f'<g class="{kind}"><circle class="page" cx="{x:.1f}" cy="39" r="{radius}"/></g>')
        parts.append(f'<text class="chart-name" x="{x + 12:.1f}" y="43">{name}</text>')
        x += 12 + 6.4 * len(name) + 22
    for kind, name in (("tree", "first link"), ("walk", "order of visits")):
        parts.append(f'<path class="{kind}" d="M{x:.1f} 39h24"/>')
        parts.append(f'<text class="chart-name" x="{x + 31:.1f}" y="43">{name}</text>')
        x += 31 + 6.4 * len(name) + 22
    return "".join(parts)


def _lines(episode: _Episode, places: np.ndarray) -> str:
    tree = {(page.parent, number) for number, page in enumerate(episode.pages)}
    thin = [(a, b) for a, b in episode.links if a < b and (a, b) not in tree]
    parts = []
    for a, b in thin:
        (x1, y1), (x2, y2) = places[a], places[b]
        parts.append(f'<line class="link" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for number, page in enumerate(episode.pages):
        if page.parent >= 0:
            (x1, y1), (x2, y2) = places[page.parent], places[number]
            parts.append(f'<path class="tree" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
    return "".join(parts)


def _walked(places: np.ndarray) -> str:
    """Draw curves from each page to the next, to distinguish them from links."""
    parts = []
    for (x1, y1), (x2, y2) in pairwise(places):
        bend = 0.14
        x, y = (x1 + x2) / 2 - bend * (y2 - y1), (y1 + y2) / 2 + bend * (x2 - x1)
        parts.append(f'<path class="walk" d="M{x1:.1f} {y1:.1f}Q{x:.1f} {y:.1f} {x2:.1f} {y2:.1f}"/>')
    return "".join(parts)


def _unvisited(page: _Page, place: np.ndarray, scale: float) -> str:
    """Draw a dot for each page that this one was the first to link to, in a sunflower pattern."""
    dots = []
    for number in range(page.others):
        distance, angle = scale * halo(number + 1, middle=True), number * math.pi * (3 - math.sqrt(5))
        x, y = place[0] + distance * math.cos(angle), place[1] + distance * math.sin(angle)
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.7 * scale:.2f}"/>')
    return f'<g class="unvisited fill">{"".join(dots)}</g>' if dots else ""


def _visit(number: int, page: _Page, place: np.ndarray, scale: float) -> str:
    x, y = place
    tooltip = f"{number or 'start'}: {page.url}\n{_KINDS[page.kind]}, relevance {page.relevance:.2f}"
    ring = f'<circle class="start" cx="{x:.1f}" cy="{y:.1f}" r="{16 * scale:.1f}"/>' if number == 0 else ""
    size = scale * (10.5 if 0 < number < 100 else 8.5)
    text = f'x="{x:.1f}" y="{y + 0.36 * size:.1f}" font-size="{size:.1f}"'
    return (
        f'<g class="spot {page.kind}"><title>{escape(tooltip)}</title>{ring}'
        f'<circle class="page" cx="{x:.1f}" cy="{y:.1f}" r="{scale * (10 if number else 13):.1f}"/>'
        f'<text class="visit" {text}>{number or "start"}</text></g>'
    )


def _strip(episode: _Episode) -> str:
    """Draw the walk as a row of boxes, one per page."""
    top, height, count = SIZE[1] - 40, 18, len(episode.pages)
    width = min(26.0, (SIZE[0] - 4) / count)
    every = 5 * math.ceil(26 / (5 * width))  # of the numbers below them
    parts, found = [], 0
    for number, page in enumerate(episode.pages):
        found += page.kind == "found"
        tooltip = f"{number or 'start'}: {page.url}\n{_KINDS[page.kind]}; {found} found so far"
        place = f'x="{2 + number * width:.1f}" y="{top}" width="{width - 1.5:.1f}" height="{height}"'
        parts.append(
            f'<g class="spot {page.kind}"><title>{escape(tooltip)}</title><rect class="fill" {place} rx="2"/></g>'
        )
        x = 2 + (number + 0.5) * width
        if number % every == 0 and x > 70:
            parts.append(f'<text x="{x:.1f}" y="{top + height + 15}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="2" y="{top + height + 15}">requests</text>')
    return "".join(parts)


# -- the file ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> _Episode | None:
    """Read the file; None if it does not exist or is invalid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        pages = [_page(number, page) for number, page in enumerate(data["pages"][:_MAX_PAGES])]
        count = len(pages)
        links = [(int(a), int(b)) for a, b in data["links"][:_MAX_LINKS] if 0 <= a < count and 0 <= b < count]
        episode = _Episode(int(data["step"]), pages, links, int(data["known"]), int(data["visited"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return episode if pages else None


def _page(number: int, data: dict[str, Any]) -> _Page:
    parent, relevance = int(data["parent"]), float(data["relevance"])
    if not -1 <= parent < number and number:
        raise ValueError("the parent of a page must be an earlier visit")
    kind = "found" if data["relevant"] else _STATES[data["state"]]
    url = str(data["url"])[:_MAX_URL]
    return _Page(url, kind, relevance, parent if number else -1, min(max(0, int(data["others"])), 120))
