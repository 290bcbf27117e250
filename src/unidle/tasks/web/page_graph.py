"""The pages of a site known within an episode, and the links between them, in a few bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from unidle.errors import UsageError

MAX_PAGES = 20_000  # per episode; a site with endless URLs must not fill the memory
LINK_WORDS = 8  # of a link's text
FRONTIER, FETCHED, FAILED, DUPLICATE = range(4)
STATES = ("frontier", "fetched", "failed", "duplicate")
_RECORD_PAGES, _RECORD_URL = 120, 200  # of an episode record: visited pages, and characters of a URL

# One array each: gather and scatter are ten times as fast as with structured arrays.
_FIELDS: dict[str, tuple[type, int]] = {  # dtype, values per page
    "state": (np.uint8, 1),
    "nofollow": (np.bool_, 1),
    "relevant": (np.bool_, 1),
    "depth": (np.uint16, 1),  # clicks from the start page
    "seen_at": (np.uint16, 1),  # requests made before it was discovered
    "linked": (np.uint16, 1),  # pages that link to it
    "tried": (np.uint16, 1),  # links discovered here that were followed
    "hits": (np.uint16, 1),  # relevant pages among those
    "parent": (np.int32, 1),  # the page it was discovered on; -1: none
    "match": (np.float32, 1),  # best topic match of its links, 0 to 1
    "best": (np.float32, 1),  # relevance of the most relevant page that links to it
    "total": (np.float32, 1),  # sum over all pages that link to it
    "relevance": (np.float32, 1),  # its own, once fetched
    "score": (np.float32, 1),  # priority in the frontier; -inf once followed
    "words": (np.uint8, LINK_WORDS),  # of its first link, hashed, from 1; 0 where there are fewer
}


@dataclass(frozen=True, slots=True)
class LinkFeatures:
    """The links of a page as stored in the graph."""

    urls: list[str]  # no duplicates
    match: np.ndarray  # [links] float32, topic match
    nofollow: np.ndarray  # [links] bool
    words: np.ndarray  # [links, LINK_WORDS] uint8, hashed, from 1; 0 where there are fewer

    def only(self, may: Sequence[bool]) -> LinkFeatures:
        """The links selected by a mask."""
        if all(may):
            return self
        kept = np.flatnonzero(may)
        urls = self.urls
        return LinkFeatures([urls[i] for i in kept.tolist()], self.match[kept], self.nofollow[kept], self.words[kept])


class PageGraph:
    """Pages by index; 0 is the start page."""

    def __init__(self, start: str) -> None:
        self.urls = [start]
        self._numbers = {start: 0}
        self.columns = _columns(128)  # by the names above; longer than there are pages
        self.columns["parent"][0] = -1
        self._edges: list[tuple[int, np.ndarray]] = []  # (from, to [links])
        self.visits: list[int] = []  # pages in the order of the requests

    def __len__(self) -> int:
        return len(self.urls)

    @property
    def nodes(self) -> dict[str, np.ndarray]:
        """[pages] of each of `_FIELDS`."""
        return {name: column[: len(self.urls)] for name, column in self.columns.items()}

    def frontier(self, limit: int) -> np.ndarray:
        """The best links not yet followed, best first; ties go to the older one."""
        score = self.columns["score"][: len(self.urls)]
        best = np.argpartition(score, -limit)[-limit:] if len(score) > limit else np.arange(len(score))
        best = best[np.argsort(-score[best], kind="stable")]
        return best[np.isfinite(score[best])]

    def add_links(self, page: int, links: LinkFeatures, relevance: float, requests: int) -> int:
        """Add the links of a page; return how many are new."""
        first = len(self.urls)
        targets = np.fromiter(map(self._numbers.get, links.urls, repeat(-1)), np.int32, len(links.urls))
        new = np.flatnonzero(targets < 0)[: MAX_PAGES - first]
        if len(new):
            urls = [links.urls[at] for at in new.tolist()]
            numbers = range(first, first + len(urls))
            self._numbers.update(zip(urls, numbers))
            self.urls += urls
            self._grow()
            targets[new] = numbers
            nodes, added = self.columns, slice(first, len(self.urls))
            nodes["nofollow"][added], nodes["words"][added] = links.nofollow[new], links.words[new]
            nodes["depth"][added] = min(int(nodes["depth"][page]) + 1, 65535)
            nodes["seen_at"][added], nodes["parent"][added] = min(requests, 65535), page
        match = links.match
        others = (targets >= 0) & (targets != page)
        if np.count_nonzero(others) < len(others):
            targets, match = targets[others], match[others]
        nodes = self.columns
        linked = nodes["linked"][targets] + np.uint16(1)  # a page has no duplicate links
        best = np.maximum(nodes["best"][targets], np.float32(relevance))
        match = np.maximum(nodes["match"][targets], match)
        nodes["linked"][targets], nodes["best"][targets], nodes["match"][targets] = linked, best, match
        nodes["total"][targets] += np.float32(relevance)
        score = match + 0.5 * best + 0.05 * np.log1p(linked, dtype=np.float32)
        score -= 0.02 * nodes["depth"][targets] + 0.3 * nodes["nofollow"][targets] + 1e-6 * targets
        score[nodes["state"][targets] != FRONTIER] = -np.inf
        nodes["score"][targets] = score
        self._edges.append((page, targets))
        return len(new)

    def record_visit(self, page: int, state: int, relevance: float = 0.0, relevant: bool = False) -> None:
        """Record that a page was requested."""
        nodes = self.columns
        self.visits.append(page)
        nodes["state"][page], nodes["score"][page] = state, -np.inf
        nodes["relevance"][page], nodes["relevant"][page] = relevance, relevant
        parent = nodes["parent"][page]
        if parent >= 0:
            nodes["tried"][parent] += 1
            nodes["hits"][parent] += relevant

    def record_redirect(self, page: int, url: str) -> bool:
        """Record that `page` redirects to `url`; True if that page was fetched before."""
        other = self._numbers.setdefault(url, page)
        if other == page:
            return False
        was_fetched = bool(self.columns["state"][other] == FETCHED)
        if not was_fetched:
            self.columns["state"][other], self.columns["score"][other] = DUPLICATE, -np.inf
        return was_fetched

    def to_networkx(self) -> Any:
        """The same as a `networkx.DiGraph`, with URLs as nodes; `visit` is the index of the visit."""
        graph = import_networkx().DiGraph()
        nodes, visits = self.nodes, {page: visit for visit, page in enumerate(self.visits)}
        for number, url in enumerate(self.urls):
            graph.add_node(
                url,
                state=STATES[nodes["state"][number]],
                depth=int(nodes["depth"][number]),
                relevance=float(nodes["relevance"][number]),
                relevant=bool(nodes["relevant"][number]),
                visit=visits.get(number),
            )
        for page, targets in self._edges:
            graph.add_edges_from((self.urls[page], self.urls[target]) for target in targets.tolist())
        return graph

    def to_record(self) -> dict[str, Any]:
        """The visited pages in order, as JSON, with the number of unvisited pages discovered on each."""
        nodes, visits = self.nodes, self.visits[:_RECORD_PAGES]
        place = {page: visit for visit, page in enumerate(visits)}
        parents = nodes["parent"][nodes["state"] == FRONTIER]
        others = np.bincount(parents[parents >= 0], minlength=len(self))
        links = [
            (place[page], place[target])
            for page, targets in self._edges
            if page in place
            for target in targets.tolist()
            if target in place
        ]
        return {
            "pages": [
                {
                    "url": self.urls[page][:_RECORD_URL],
                    "state": STATES[nodes["state"][page]],
                    "relevance": round(float(nodes["relevance"][page]), 3),
                    "relevant": bool(nodes["relevant"][page]),
                    "parent": place.get(int(nodes["parent"][page]), -1),
                    "others": int(others[page]),
                }
                for page in visits
            ],
            "links": links,
            "known": len(self),
            "visited": len(self.visits),
        }

    def _grow(self) -> None:
        size = len(self.columns["state"])
        while size < len(self.urls):
            size *= 2
        if size > len(self.columns["state"]):
            more = _columns(size)
            for name, column in self.columns.items():
                more[name][: len(column)] = column
            self.columns = more


def _columns(size: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size if each == 1 else (size, each), dtype) for name, (dtype, each) in _FIELDS.items()}


def import_networkx() -> Any:
    """Import networkx; UsageError if it is missing."""
    try:
        import networkx  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("export_graph needs the package networkx; run: pip install 'unidle[web]'.") from None
    return networkx
