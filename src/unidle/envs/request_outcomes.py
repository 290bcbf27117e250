"""What can become of a request that an environment makes to a server, and how these are counted."""

from __future__ import annotations

from typing import Literal, get_args

Failure = Literal[
    "refused",  # not on the allow-list, or not http; nothing was sent
    "robots",  # robots.txt asks not to; nothing was sent
    "dns",  # the name is not known
    "connect",  # nobody answered there
    "timeout",  # not finished in time
    "broken",  # cut short, or not HTTP, or packed in a way that cannot be unpacked
    "too_large",  # more than `max_bytes`, as sent or unpacked
    "redirects",  # too many, in a circle, or to nowhere
    "status",  # an answer other than 2xx
]
# In the order in which they are counted; a page that takes too long to parse is "unread".
OUTCOMES: tuple[str, ...] = ("ok", "retry", *get_args(Failure), "unread")
