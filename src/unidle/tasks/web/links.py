"""Fast conversion of `href` to a canonical absolute URL."""

from __future__ import annotations

import re
from functools import lru_cache

MAX_LENGTH = 2048  # characters; longer URLs are usually crawler traps

# Fast path: what yarl would leave unchanged (no quoting, dots, scheme or empty query), with an optional fragment.
_PLAIN = re.compile(r"(/?(?:[A-Za-z0-9_~\-][A-Za-z0-9_~.\-]*+/?)++(?:\?[A-Za-z0-9/_~.=&+,;\-]++)?)(?:#.*)?")
_UNFETCHABLE = ("mailto:", "javascript:", "tel:", "data:")
_STRIPPED = "".join(map(chr, range(0x21)))  # controls and spaces, as browsers do
_INNER = str.maketrans("", "", "\t\r\n")


class LinkBase:
    """The base URL of a page's links."""

    def __init__(self, url: str) -> None:
        """`url` is absolute."""
        from yarl import URL

        self.url = URL(url)
        self._origin = str(self.url.origin())
        path = self.url.raw_path
        self._folder = path[: path.rindex("/") + 1]
        self._plain_origin = f"{self._origin}/"
        self._own: str | None = None

    def absolute(self, href: str) -> str | None:
        """The absolute URL without its fragment; None if it cannot be fetched (mailto:, javascript:, …)."""
        plain = _PLAIN.fullmatch(href)
        if plain is None:
            href = href.strip(_STRIPPED)
            if href.startswith(self._plain_origin):
                plain = _PLAIN.fullmatch(href, len(self._origin))
            if plain is None:
                return self._slow_path(href)
        path = plain[1]
        found = f"{self._origin}{path}" if path[0] == "/" else f"{self._origin}{self._folder}{path}"
        return found if len(found) <= MAX_LENGTH else None

    def _slow_path(self, href: str) -> str | None:
        """Links outside the fast path."""
        if href.startswith(_UNFETCHABLE):
            return None
        if href.startswith(("http://", "https://")):
            href = href.partition("#")[0]
            return _absolute_cached(href) if len(href) <= MAX_LENGTH else None  # bounds the cache
        if not href.startswith("#"):
            return self.resolve(href)
        if self._own is None:
            self._own = self.resolve("")
        return self._own

    def resolve(self, href: str) -> str | None:
        """`absolute` for any `href`, with yarl."""
        from yarl import URL

        try:
            url = self.url.join(URL(href.partition("#")[0].strip(_STRIPPED).translate(_INNER).replace("\\", "/")))
            if url.scheme not in ("http", "https") or not url.raw_host or url.user or url.password:
                return None
            found = f"{url.origin()}{url.raw_path_qs}"
        except ValueError:
            return None
        return found if len(found) <= MAX_LENGTH else None


@lru_cache(4096)
def _absolute_cached(href: str) -> str | None:
    """Absolute URLs do not depend on the page, and often repeat on every page: cached."""
    return LinkBase("http://invalid/").resolve(href)
