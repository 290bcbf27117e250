"""Focused crawling: within a budget of requests, find the pages of a website that are about a topic.

An action follows one of the most promising links, or stops. The observation, all values from 0 to 1:

    page   the page just fetched: a hashed bag of words, and the outcome of the request
    links  [links, ..] the candidate links: hashed words of each, and facts about its target
    graph  the progress of the episode
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from unidle.envs.request_outcomes import OUTCOMES
from unidle.errors import UsageError
from unidle.tasks.web.addresses import AllowList, RefusedError
from unidle.tasks.web.fetch import Fetcher
from unidle.tasks.web.fetch_policy import FetchPolicy, Page
from unidle.tasks.web.links import LinkBase
from unidle.tasks.web.page import MAX_LINKS, MAX_WORDS
from unidle.tasks.web.page_features import LINK_BUCKETS, PAGE_WORDS, PageFeatureCache, PageFeatures, read
from unidle.tasks.web.page_graph import DUPLICATE, FAILED, FETCHED, PageGraph, import_networkx
from unidle.tasks.web.text_features import BUCKETS, Topic

PAGE_FACTS, LINK_FACTS, GRAPH_FACTS = 8, 9, 10
_RECENT = 8  # requests
_NUMBER = {kind: number for number, kind in enumerate(OUTCOMES)}
_fetched_starts: set[str] = set()  # start pages that this process has fetched: if one fails later, its URL is valid

Observation = dict[str, np.ndarray]


class SiteExplore:
    """An `AsyncEnv`; all environments of an event loop share limits and connections."""

    def __init__(
        self,
        site: str | Sequence[str],
        topic: str | Sequence[str] = "comet orbit telescope galaxy nebula planet",
        *,
        budget: int = 40,
        links: int = 16,
        relevant_at: float = 0.5,
        cost: float = 0.05,
        novelty: float = 0.1,
        keep_pages: bool = True,
        export_graph: bool = False,
        fetcher: Fetcher | None = None,
        **policy: Any,
    ) -> None:
        """Explore `site` (if several, one chosen by the episode's seed) for pages about `topic`, in `budget` requests.

        A page is relevant if its relevance, 0 to 1, is at least `relevant_at`. The reward of a request is 1 for a new
        relevant page, plus up to `novelty` for words not seen before in the episode, minus `cost`. Pages are always
        fetched; with `keep_pages`, a page with the same bytes as one of an earlier episode is not parsed again. With
        `export_graph`, `info["graph"]` of an episode's last step is its pages and links as a `networkx.DiGraph`.
        `policy` takes the fields of `FetchPolicy`; without `hosts`, only the site itself may be accessed, and it must
        be on loopback.
        """
        self.sites = [_start(url) for url in ([site] if isinstance(site, str) else site)]
        if not self.sites or budget < 1 or links < 1:
            raise UsageError(
                "SiteExplore needs at least one site, a budget of one request and one link to choose from."
            )
        self.topic = Topic(topic)
        self.policy = fetcher.policy if fetcher else _policy(self.sites, policy)
        self.budget, self.links, self.relevant_at = budget, links, relevant_at
        self.cost, self.novelty = cost, novelty
        self._feature_cache = PageFeatureCache.shared(self.topic) if keep_pages else None
        if export_graph:
            import_networkx()  # report a missing package early
        self._exports_graph = export_graph
        self.records_next_episode = False  # store the record of the next episode that ends
        self.episode_record: dict[str, Any] | None = None
        self.action_space = spaces.Discrete(links + 1)  # the last one stops
        shapes = {
            "page": (PAGE_WORDS + PAGE_FACTS,),
            "links": (links, LINK_FACTS + LINK_BUCKETS),
            "graph": (GRAPH_FACTS,),
        }
        self.observation_space = spaces.Dict({key: spaces.Box(0.0, 1.0, shape) for key, shape in shapes.items()})
        self._fetcher, self._owns_fetcher = fetcher, fetcher is None
        self._has_fetched = False
        self.requests_made = np.zeros(len(OUTCOMES), np.int64)  # by outcome; whoever reads it resets it
        self._begin(self.sites[0])

    def _begin(self, start: str) -> None:
        self.graph = PageGraph(start)
        self.requests = self.found = self.failed = 0
        self.candidates = np.zeros(0, np.int64)  # candidate links, as page indices of the graph
        self._seen = np.zeros(BUCKETS, np.bool_)  # words
        self._bodies: set[int] = set()
        self._recent: deque[bool] = deque(maxlen=_RECENT)  # whether a new relevant page was found
        self._page = np.zeros(PAGE_WORDS + PAGE_FACTS, np.float32)
        self._relevance, self._new_word_share, self._has_failed = 0.0, 0.0, False

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Fetch the start page, which does not count against the budget."""
        if self._fetcher is None:
            self._fetcher = Fetcher.shared(self.policy)
        start = self.sites[seed % len(self.sites)]
        self._begin(start)
        page = await self._visit(0)
        if page.failure is None:
            self._has_fetched = True
            _fetched_starts.add(start)
        elif not self._has_fetched and start not in _fetched_starts:
            raise UsageError(
                f"{start} could not be fetched ({page.failure}: {page.why}); check the URL, or serve a generated "
                "site with: python -m unidle.tasks.web.site"
            )
        return self._observe(), self._info()

    async def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Follow a link, or stop; an invalid choice uses up a request."""
        choice = int(action)
        if choice == self.links:
            return self._observe(), 0.0, True, False, self._info(has_ended=True)
        self.requests += 1
        found, reward = self.found, -self.cost
        self._new_word_share, self._has_failed = 0.0, False
        if 0 <= choice < len(self.candidates):
            await self._visit(int(self.candidates[choice]))
            reward += (self.found - found) + self.novelty * self._new_word_share
        self._recent.append(self.found > found)
        observation = self._observe()
        # The budget is part of the observation, so exhausting it is a termination, not a truncation.
        terminated = self.requests >= self.budget or not len(self.candidates)
        return observation, reward, terminated, False, self._info(has_ended=terminated)

    async def close(self) -> None:
        """Release the connections."""
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None and self._owns_fetcher:
            await fetcher.release()

    # -- a page --------------------------------------------------------------------------------------------------------

    async def _visit(self, number: int) -> Page:
        """Fetch a page and add it to the graph."""
        assert self._fetcher is not None
        page = await self._fetcher.fetch(self.graph.urls[number])
        features = None
        if page.failure is None:
            features = await (self._feature_cache.of(page) if self._feature_cache else read(page, self.topic))
        outcome = page.failure or ("ok" if features is not None else "unread")
        self.requests_made[_NUMBER[outcome]] += 1
        self.requests_made[_NUMBER["retry"]] += page.attempts - 1
        if features is None:
            self.failed += 1
            self._has_failed = True
            self.graph.record_visit(number, FAILED)
            self._set_page_features(None, page, is_duplicate=False, new_links=0)
            return page
        is_duplicate = self.graph.record_redirect(number, page.url) or hash(page.body) in self._bodies
        self._bodies.add(hash(page.body))
        self._relevance = features.relevance
        counts = features.relevance >= self.relevant_at and not is_duplicate
        self.found += counts
        self.graph.record_visit(number, DUPLICATE if is_duplicate else FETCHED, features.relevance, counts)
        links = features.followable(self._fetcher.rules_version, self._fetcher.may_follow)
        new_links = self.graph.add_links(number, links, features.relevance, self.requests)
        self._set_page_features(features, page, is_duplicate, new_links)
        return page

    # -- observations --------------------------------------------------------------------------------------------------

    def _set_page_features(self, features: PageFeatures | None, page: Page, is_duplicate: bool, new_links: int) -> None:
        """Set the observation of the page just fetched."""
        self._page = observed = np.zeros(PAGE_WORDS + PAGE_FACTS, np.float32)
        if features is None:
            observed[PAGE_WORDS:] = (0, 0, 0, 0, 0, 1, 0, page.status >= 400)
            return
        if len(features.buckets):
            known = np.count_nonzero(self._seen[features.buckets])
            self._new_word_share = (1.0 - known / len(features.buckets)) * (not is_duplicate)
            self._seen[features.buckets] = True
            observed[:PAGE_WORDS] = features.bag
        n_links = len(features.links.urls)
        observed[PAGE_WORDS:] = (
            features.relevance,
            self._new_word_share,
            _log_scaled(features.n_words, MAX_WORDS),
            _log_scaled(n_links, MAX_LINKS),
            new_links / max(1, n_links),
            0,
            is_duplicate,
            not features.is_html,
        )

    def _observe(self) -> Observation:
        graph, nodes = self.graph, self.graph.columns
        self.candidates = candidates = graph.frontier(self.links)
        parents, linked = nodes["parent"][candidates], nodes["linked"][candidates]
        match, best = nodes["match"][candidates], nodes["best"][candidates]
        count = len(candidates)
        links = np.zeros((self.links, LINK_FACTS + LINK_BUCKETS), np.float32)
        # Words count from 1; 0, no word, writes to the last fact, which is overwritten below.
        links[np.arange(count)[:, None], LINK_FACTS - 1 + nodes["words"][candidates]] = 1.0
        facts = links[:count, :LINK_FACTS]
        facts[:, 0] = 1.0
        facts[:, 1] = match
        facts[:, 2] = best
        facts[:, 3] = nodes["total"][candidates] / np.maximum(linked, 1)
        facts[:, 4] = np.minimum(np.log1p(linked, dtype=np.float32) / math.log(1 + self.budget), 1.0)
        facts[:, 5] = np.minimum(nodes["depth"][candidates] / 10.0, 1.0)
        facts[:, 6] = (self.requests - nodes["seen_at"][candidates].astype(np.float32)) / self.budget
        facts[:, 7] = nodes["nofollow"][candidates]
        facts[:, 8] = (nodes["hits"][parents] + 0.5) / (
            nodes["tried"][parents] + 1.0
        )  # success rate of that page's links
        done = self.requests or 1
        summary = (
            1.0 - self.requests / self.budget,
            min(self.found / self.budget, 1.0),
            min(self.found / done, 1.0),
            sum(self._recent) / _RECENT,
            len(self._recent) / _RECENT,
            min(self.failed / done, 1.0),
            _log_scaled(len(graph), 10_000),
            count / self.links,
            float(match.sum()) / max(1, count),
            float(best.sum()) / max(1, count),
        )
        return {
            "page": self._page.copy(),
            "links": links,
            "graph": np.array(summary, np.float32),
        }

    def _info(self, has_ended: bool = False) -> dict[str, Any]:
        if has_ended and self.records_next_episode:
            self.episode_record, self.records_next_episode = (
                {"found": self.found, "requests": self.requests, **self.graph.to_record()},
                False,
            )
        graph = {"graph": self.graph.to_networkx()} if has_ended and self._exports_graph else {}
        mask = np.zeros(self.links + 1, np.uint8)
        mask[: len(self.candidates)] = mask[self.links] = 1
        return {
            "action_mask": mask,
            "requests": self.requests,
            "found": self.found,
            "relevance": self._relevance,
            "failed": self._has_failed,
            **graph,
        }


def _log_scaled(count: float, full: float) -> float:
    """Scale a count logarithmically to [0, 1]."""
    return min(math.log1p(count) / math.log1p(full), 1.0)


def _start(url: str) -> str:
    bare = LinkBase("http://invalid/").resolve(url) if "://" in url else None
    if bare is None:
        raise UsageError(f"`{url}` is not the URL of a site; write it like http://127.0.0.1:8000/.")
    return bare


def _policy(sites: Sequence[str], given: dict[str, Any]) -> FetchPolicy:
    from yarl import URL

    policy = FetchPolicy(**given)
    allowed = AllowList.of(policy.hosts)
    for site in sites:
        url = URL(site)
        try:
            allowed.check_host(url.raw_host or "", url.port or 0)
        except RefusedError:
            raise UsageError(
                f"{site} is not on the list of allowed hosts; if you may crawl it, add hosts=['{url.host}'] "
                "to env_kwargs."
            ) from None
    if policy.hosts:
        return policy
    # Do not allow access to other services on this machine.
    own = [(url.raw_host or "", url.port) for url in map(URL, sites)]
    listed = tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in dict.fromkeys(own))
    return FetchPolicy(**{**given, "hosts": listed})
