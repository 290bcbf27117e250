"""Generates a website from a seed: the topics of its pages, their links and their HTML.

Pages on one topic link to each other more than to others. Some link texts name the topic of their target; as many
misleadingly name the topic of the page they are on, with advertising words; the others are vague. Following every link
that names the topic finds a few pages; learning which words are honest finds many. Every page also has the usual other
links: to the top, to a fragment of itself, to the same page by another URL, to mail, to another host, to missing pages,
to pages that robots.txt disallows, and into an endless archive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from unidle.errors import UsageError
from unidle.tasks.web.site.topics import ADVERTISING_WORDS, HONEST_WORDS, PLAIN_WORDS, TOPICS, VAGUE_LINKS

NAMES = tuple(TOPICS)
_SAME_TOPIC = 0.35  # of a page's links at least; some of the others by chance too
_HONEST = 0.35  # of links: their text is about their target's topic
_MISLEADING = 0.45  # of links to other topics whose text names this topic
_TOPIC_WORDS = (0.05, 0.15)  # share of a page's words that are about its topic, from page to page
_STRAY_WORDS = 0.01  # share that are about some other topic
_PARAGRAPH = 60  # words
_PATH = re.compile(r"(?:[a-z]+/)?[a-z]+-(\d+)\.html")
_ARCHIVE = re.compile(r"archive/(\d+)\.html")


@dataclass(frozen=True)
class Layout:
    """The size of a site."""

    pages: int = 1000
    links: int = 50  # per page to other pages, approximately
    page_bytes: int = 30_000  # per page, approximately

    def __post_init__(self) -> None:
        if self.pages < 10 or self.links < 1 or self.page_bytes < 1:
            raise UsageError("A site needs at least 10 pages, with at least one link and one byte each.")


@dataclass(frozen=True)
class Site:
    """One website; page 0 is the start page."""

    seed: int
    layout: Layout
    topic: np.ndarray  # [pages] of each page, as an index of NAMES
    density: np.ndarray  # [pages] share of its words that are about its topic
    targets: list[np.ndarray]  # for each page, the pages it links to
    paths: list[str] = field(repr=False)  # of each page, relative to the site's URL

    @staticmethod
    def of(seed: int, layout: Layout | None = None) -> Site:
        """Generate the site of a seed, deterministically."""
        layout = layout or Layout()
        rng = np.random.default_rng([seed, layout.pages, layout.links])
        pages = layout.pages
        topic = rng.integers(len(NAMES), size=pages)
        topic[: len(NAMES) + 1] = [0, *range(len(NAMES))]  # the start page, and one page of each topic that it links to
        density = rng.uniform(*_TOPIC_WORDS, pages)
        density[0] = 0.0
        of_topic = [np.flatnonzero(topic == index) for index in range(len(NAMES))]
        links: list[list[int]] = [[] for _ in range(pages)]
        links[0] = list(range(1, len(NAMES) + 1))
        for page in range(len(NAMES) + 1, pages):  # a tree, so that every page can be reached
            same_topic = of_topic[topic[page]]
            earlier = same_topic[(same_topic > 0) & (same_topic < page)]
            links[int(rng.choice(earlier)) if rng.random() < 0.9 else int(rng.integers(1, page))].append(page)
        for page in range(1, pages):
            n_more = max(0, int(rng.normal(layout.links, layout.links / 5)) - len(links[page]))
            same = rng.choice(of_topic[topic[page]], rng.binomial(n_more, _SAME_TOPIC))
            links[page] += [*same.tolist(), *rng.integers(1, pages, n_more - len(same)).tolist()]
        targets = [
            rng.permutation(list(dict.fromkeys(target for target in row if target != page))).astype(np.int64)
            for page, row in enumerate(links)
        ]
        words = rng.choice(PLAIN_WORDS, (pages, 2))
        # Every third page is in a folder named after its topic.
        folders = [
            f"{NAMES[index]}/" if has_folder else "" for index, has_folder in zip(topic, rng.random(pages) < 1 / 3)
        ]
        paths = ["", *(f"{folders[n]}{words[n, 0]}{words[n, 1]}-{n}.html" for n in range(1, pages))]
        return Site(seed, layout, topic, density, targets, paths)

    def number(self, path: str) -> int | None:
        """The page at a path; None if there is none."""
        found = _PATH.fullmatch(path)
        page = int(found[1]) if found and len(found[1]) < 10 else 0
        return page if page < self.layout.pages and self.paths[page] == path else None

    def html(self, path: str, prefix: str = "/") -> bytes | None:
        """The HTML at a path below `prefix`; None if there is no page."""
        archive = _ARCHIVE.fullmatch(path)
        if archive and len(archive[1]) < 10:
            return self._archive(int(archive[1]), prefix)
        page = self.number(path)
        return None if page is None else self._page(page, prefix)

    def _page(self, page: int, prefix: str) -> bytes:
        rng = np.random.default_rng([self.seed, 1, page])
        own = TOPICS[NAMES[self.topic[page]]]
        anchors = self._anchors(page, prefix, rng)
        room = max(_PARAGRAPH, (self.layout.page_bytes - sum(map(len, anchors)) - 600) // 6)  # words of 6 letters
        text = self._words(room, own, float(self.density[page]), rng)
        paragraphs = [text[at : at + _PARAGRAPH] for at in range(0, len(text), _PARAGRAPH)]
        # Links are spread evenly over the text.
        slots = np.linspace(0, len(paragraphs), len(anchors), endpoint=False).astype(int)
        parts: list[list[str]] = [[" ".join(paragraph)] for paragraph in paragraphs]
        for slot, anchor in zip(slots, anchors):
            parts[slot].append(anchor)
        title = "Welcome" if page == 0 else " ".join(rng.choice(own, 2)) + f" {page}"
        return _document(title, "\n".join(f"<p>{' '.join(part)}</p>" for part in parts))

    def _words(self, count: int, own: tuple[str, ...], density: float, rng: np.random.Generator) -> list[str]:
        stray = TOPICS[NAMES[rng.integers(len(NAMES))]]
        kind = rng.random(count)
        plain = rng.integers(len(PLAIN_WORDS), size=count).tolist()
        words = [PLAIN_WORDS[index] for index in plain]
        for at in np.flatnonzero(kind < density + _STRAY_WORDS).tolist():
            words[at] = own[plain[at] % len(own)] if kind[at] < density else stray[plain[at] % len(stray)]
        return words

    def _anchors(self, page: int, prefix: str, rng: np.random.Generator) -> list[str]:
        anchors = []
        for target in self.targets[page].tolist():
            draw, pick = rng.random(), int(rng.integers(1 << 30))
            text = VAGUE_LINKS[pick % len(VAGUE_LINKS)]
            if draw < _HONEST or page == 0:
                text = _link_text(self.topic[target], HONEST_WORDS, pick)
            elif draw < _HONEST + _MISLEADING and self.topic[target] != self.topic[page]:
                text = _link_text(self.topic[page], ADVERTISING_WORDS, pick)
            anchors.append(f'<a href="{prefix}{self.paths[target]}">{text}</a>')
        here, other = f"{prefix}{self.paths[page]}", int(rng.integers(1, self.layout.pages))
        anchors += [
            f'<a href="{prefix}">top</a>',
            f'<a href="{here}#notes">notes</a>',
            '<a href="#more">more</a>',
            f'<a href="{prefix}./x/../{self.paths[other]}#read">in other words</a>',
            '<a href="mailto:nobody@invalid">write to us</a>',
            '<a href="javascript:void(0)">print</a>',
            '<a href="http://elsewhere.invalid/" rel="nofollow">friends</a>',
            f'<a href="{prefix}private/{page}.html">members</a>',
            f'<a href="{prefix}archive/{int(rng.integers(1000))}.html">archive</a>',
            f'<a href="{prefix}lost/{page}.html">old news</a>',
            f'<a href="{prefix}files/{page}.pdf">as a file</a>',
            f'<a href="{prefix}go/{other}">surprise me</a>',
        ]
        return anchors

    def _archive(self, number: int, prefix: str) -> bytes:
        rng = np.random.default_rng([self.seed, 2, number])
        words = " ".join(self._words(300, PLAIN_WORDS, 0.0, rng))
        more = " ".join(
            f'<a href="{prefix}archive/{number + step}.html">entry {number + step}</a>' for step in range(1, 9)
        )
        return _document(f"Archive {number}", f"<p>{words}</p><p>{more}</p>")


def _link_text(topic: int, companions: tuple[str, ...], pick: int) -> str:
    words = TOPICS[NAMES[topic]]
    return f"{words[pick % len(words)]} {companions[pick // 16 % len(companions)]} {words[pick // 256 % len(words)]}"


def _document(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>p {{ max-width: 40em }}</style><script>var never = 'run';</script></head>"
        f"<body><h1>{title}</h1>\n{body}\n</body></html>"
    ).encode()
