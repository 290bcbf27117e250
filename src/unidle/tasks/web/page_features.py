"""Features of a page for one topic, and a cache of them.

Episodes on one site visit the same pages repeatedly. The features depend only on the page's bytes, its URL and the
topic, which are the cache key, so a page that has changed is parsed again. The size of the cache is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from unidle.tasks.web import page as pages
from unidle.tasks.web.fetch_policy import Page
from unidle.tasks.web.page_graph import LINK_WORDS, LinkFeatures
from unidle.tasks.web.text_features import BUCKETS, HashedWords, Topic, WordSet, bag, hash_words

PAGE_WORDS, LINK_BUCKETS = 64, 64  # widths of the hashed bags of a page and of a link
_CACHE_BYTES = 32_000_000  # about 2,700 pages with 60 links
_PAGE_BYTES, _LINK_BYTES = 2200, 100  # of each, without its words and URL
_STOP_WORDS = WordSet(b"html htm php asp aspx jsp index www the and for".split())
_Key = tuple[str, int, int, str, str]


@dataclass(slots=True)
class PageFeatures:
    """The features of a page."""

    relevance: float  # to the topic, 0 to 1
    n_words: int
    buckets: np.ndarray  # [distinct words] uint16, hashed
    bag: np.ndarray  # [PAGE_WORDS] float32
    links: LinkFeatures
    is_html: bool
    _followed: tuple[object, LinkFeatures] | None = field(default=None, repr=False)

    def followable(self, rules_version: object, may_follow: Callable[[Iterable[str]], list[bool]]) -> LinkFeatures:
        """The links that may be followed, cached as long as `rules_version` is the same object."""
        followed = self._followed  # the event loop of another thread may set it at any time
        if followed is None or followed[0] is not rules_version:
            self._followed = followed = rules_version, self.links.only(may_follow(self.links.urls))
        return followed[1]


class PageFeatureCache:
    """Caches page features for all episodes of a process with the same topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._kept: dict[_Key, PageFeatures] = {}  # oldest first
        self._bytes = 0
        self._lock = threading.Lock()  # event loops are threads

    @staticmethod
    def shared(topic: Topic) -> PageFeatureCache:
        """The cache of this process for this topic."""
        return _shared(topic.words)

    async def of(self, page: Page) -> PageFeatures | None:
        """The features of a page, from the cache if possible; None if parsing takes too long."""
        # Collisions are negligible: a 64-bit hash with a random key, plus the URL.
        key = page.url, hash(page.body), len(page.body), page.content_type, page.charset
        found = self._kept.get(key)
        if found is None:
            found = await read(page, self._topic)
            if found is not None:
                self._keep(key, found)
        return found

    def _keep(self, key: _Key, features: PageFeatures) -> None:
        with self._lock:
            if key not in self._kept:
                self._bytes += _size(features)
                self._kept[key] = features
            while self._bytes > _CACHE_BYTES:
                oldest = next(iter(self._kept))
                self._bytes -= _size(self._kept.pop(oldest))


@lru_cache(4)
def _shared(words: frozenset[bytes]) -> PageFeatureCache:
    return PageFeatureCache(Topic([word.decode() for word in words]))


async def read(page: Page, topic: Topic) -> PageFeatures | None:
    """Compute the features of a page; None if parsing takes too long."""
    content = await pages.read(page.body, page.url, page.content_type, page.charset)
    if content is None:
        return None
    words = first_words(content.text)
    counts = np.bincount(words.buckets, minlength=BUCKETS)
    buckets = np.flatnonzero(counts).astype(np.uint16)
    return PageFeatures(
        topic.relevance(words),
        len(words),
        buckets,
        bag(buckets, counts[buckets], PAGE_WORDS),
        link_features(content.links, topic),
        content.is_html,
    )


def first_words(text: str) -> HashedWords:
    """The first MAX_WORDS words; for most texts the start of the text is enough."""
    words = hash_words([text[: 10 * pages.MAX_WORDS]])
    if len(words) <= pages.MAX_WORDS and len(text) > 10 * pages.MAX_WORDS:
        words = hash_words([text])
    return words.only(slice(pages.MAX_WORDS))


def link_features(links: Sequence[pages.Link], topic: Topic) -> LinkFeatures:
    """Features of all links of a page, from their URLs and texts."""
    count = len(links)
    terms = hash_words([f"{link.url[link.url.find('/', 8) :]} {link.text}" for link in links])
    terms = terms.only(~((terms.last - terms.before < 3) | terms.is_number | _STOP_WORDS.has(terms)))
    link = terms.texts  # [words] index of the link
    starts = np.searchsorted(link, np.arange(count))
    place = np.arange(len(link)) - starts[link]  # [words] position within the link
    words = np.zeros((count, LINK_WORDS), np.uint8)
    first = place < LINK_WORDS
    words[link[first], place[first]] = terms.buckets[first] % LINK_BUCKETS + 1
    matches = np.flatnonzero(topic.has(terms))
    distinct = set(zip(link[matches].tolist(), terms.hashes[matches].tolist()))
    match = np.zeros(count, np.float32)
    for number, _ in distinct:
        match[number] += 0.5
    return LinkFeatures(
        [link.url for link in links],
        np.minimum(match, 1.0),
        np.array([link.nofollow for link in links], np.bool_),
        words,
    )


def _size(features: PageFeatures) -> int:
    """Approximate bytes, including the key and a copy of the followable links."""
    urls = features.links.urls
    return _PAGE_BYTES + features.buckets.nbytes + _LINK_BYTES * len(urls) + sum(map(len, urls))
