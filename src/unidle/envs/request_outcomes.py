"""The possible outcomes of an HTTP request, in the order in which they are counted."""

from __future__ import annotations

from typing import Literal, get_args

Failure = Literal[
    "refused",  # not on the allow-list, or not http; nothing was sent
    "robots",  # disallowed by robots.txt; nothing was sent
    "dns",  # unknown host name
    "connect",  # no connection
    "timeout",  # not finished in time
    "broken",  # cut short, not HTTP, or not decodable
    "too_large",  # more than `max_bytes`, as sent or decompressed
    "redirects",  # too many, in a circle, or to an invalid URL
    "status",  # a status other than 2xx
]
# "unread" is a page that takes too long to parse.
OUTCOMES: tuple[str, ...] = ("ok", "retry", *get_args(Failure), "unread")
