"""What is known of a site within an episode: pages, and the links between them, in a few bytes each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unidle.errors import UsageError

MAX_PAGES = 20_000  # known in one episode; a site that invents addresses must not fill the memory
LINK_WORDS = 8  # kept of what a link says
FRONTIER, FETCHED, FAILED, DUPLICATE = range(4)
STATES = ("frontier", "fetched", "failed", "duplicate")

_NODE = np.dtype(
    [
        ("state", np.uint8),
        ("nofollow", np.bool_),
        ("relevant", np.bool_),
        ("depth", np.uint16),  # links from the start
        ("seen_at", np.uint16),  # how many requests were made before it was heard of
        ("linked", np.uint16),  # pages that link to it
        ("tried", np.uint16),  # of its links, how many were followed first from here
        ("hits", np.uint16),  # and how many of those were relevant
        ("parent", np.int32),  # the page it was first heard of on; -1: none
        ("match", np.float32),  # how much its link is about the topic, 0 to 1; the best of all
        ("best", np.float32),  # relevance of the most relevant page that links to it
        ("total", np.float32),  # and of all of them together
        ("relevance", np.float32),  # its own, once fetched
        ("score", np.float32),  # how good it looks; -inf if it is not to be followed any more
        ("words", np.uint16, (LINK_WORDS,)),  # of its first link, hashed; `blank` where there are fewer
    ]
)


class Mention(NamedTuple):
    """A link as the graph keeps it."""

    url: str
    match: float
    nofollow: bool
    words: Sequence[int]  # hashed


class PageGraph:
    """Pages by number, 0 is the start."""

    def __init__(self, start: str, blank: int) -> None:
        """`blank` stands for no word."""
        self.urls = [start]
        self._numbers = {start: 0}
        self._blank = [blank] * LINK_WORDS
        self._nodes = np.zeros(128, _NODE)
        self._nodes["parent"][0] = -1
        self._edges: list[tuple[int, np.ndarray]] = []  # (from, to [links])

    def __len__(self) -> int:
        return len(self.urls)

    @property
    def nodes(self) -> np.ndarray:
        """[pages] of `_NODE`."""
        return self._nodes[: len(self.urls)]

    def frontier(self, most: int) -> np.ndarray:
        """The links that look best and were not followed, best first; of two alike, the one that is known longer."""
        score = self.nodes["score"]
        best = np.argpartition(score, -most)[-most:] if len(score) > most else np.arange(len(score))
        best = best[np.argsort(-score[best], kind="stable")]
        return best[np.isfinite(score[best])]

    def add_links(self, page: int, mentions: Sequence[Mention], relevance: float, requests: int) -> int:
        """What was found on a page; returns how many of them are new."""
        first = len(self.urls)
        told: list[Mention] = []  # of those that are new
        ends, matches = [], []
        for mention in mentions:
            number = self._numbers.get(mention.url)
            if number is None:
                if len(self.urls) >= MAX_PAGES:
                    continue
                number = len(self.urls)
                url = sys.intern(mention.url)  # episodes on one site share their strings
                self._numbers[url] = number
                self.urls.append(url)
                told.append(mention)
            if number != page:
                ends.append(number)
                matches.append(mention.match)
        if told:
            self._grow()
            new = self.nodes[first:]
            new["nofollow"] = [mention.nofollow for mention in told]
            new["words"] = [[*mention.words, *self._blank][:LINK_WORDS] for mention in told]
            new["depth"] = min(int(self._nodes[page]["depth"]) + 1, 65535)
            new["seen_at"], new["parent"] = min(requests, 65535), page
        targets = np.array(ends, np.int32)
        nodes = self._nodes
        part = nodes[targets]
        part["linked"] += 1  # no address is twice on a page
        part["total"] += relevance
        part["best"] = np.maximum(part["best"], relevance)
        part["match"] = np.maximum(part["match"], np.array(matches, np.float32))
        score = part["match"] + 0.5 * part["best"] + 0.05 * np.log1p(part["linked"], dtype=np.float32)
        score -= 0.02 * part["depth"] + 0.3 * part["nofollow"] + 1e-6 * targets
        part["score"] = np.where(part["state"] == FRONTIER, score, -np.inf)
        nodes[targets] = part
        self._edges.append((page, targets))
        return len(told)

    def mark(self, page: int, state: int, relevance: float = 0.0, relevant: bool = False) -> None:
        """A link was followed."""
        node = self._nodes[page]
        node["state"], node["relevance"], node["relevant"], node["score"] = state, relevance, relevant, -np.inf
        if node["parent"] >= 0:
            self._nodes["tried"][node["parent"]] += 1
            self._nodes["hits"][node["parent"]] += relevant

    def is_elsewhere(self, page: int, url: str) -> bool:
        """Note that `page` is really at `url`; True if that was fetched before."""
        other = self._numbers.setdefault(url, page)
        if other == page:
            return False
        was_fetched = bool(self._nodes["state"][other] == FETCHED)
        if not was_fetched:
            self._nodes["state"][other], self._nodes["score"][other] = DUPLICATE, -np.inf
        return was_fetched

    def to_networkx(self) -> Any:
        """The same as a `networkx.DiGraph`, pages named by their addresses."""
        try:
            import networkx  # type: ignore[import-untyped]
        except ImportError:
            raise UsageError("This graph needs a package more; run: pip install networkx.") from None
        graph = networkx.DiGraph()
        for url, node in zip(self.urls, self.nodes):
            graph.add_node(
                url,
                state=STATES[node["state"]],
                depth=int(node["depth"]),
                relevance=float(node["relevance"]),
                relevant=bool(node["relevant"]),
            )
        for page, targets in self._edges:
            graph.add_edges_from((self.urls[page], self.urls[target]) for target in targets.tolist())
        return graph

    def _grow(self) -> None:
        size = len(self._nodes)
        while size < len(self.urls):
            size *= 2
        if size > len(self._nodes):
            more = np.zeros(size, _NODE)
            more[: len(self._nodes)] = self._nodes
            self._nodes = more
