"""Messages that stay on the screen or in the log, without a flood of those that say the same again."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable

_EVERY = 10.0  # seconds between two messages that are alike
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_MOST_LINES = 30  # of details; the end of a traceback tells more than its beginning
_MOST_CHARACTERS = 1000  # of a line


class Messages:
    """Shows messages as they come; alike are those that differ in their numbers only.

    An environment that fails often would otherwise bury the progress under one and the same traceback. So what follows
    a message's first line is shown once, and of messages that are alike one every ten seconds, with the count of those
    that were held back. All of them are in metrics.jsonl.
    """

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`show` gets a text and its style, for rich."""
        self._show, self._clock = show, clock
        self._next: dict[str, float] = {}  # kind of message → when the next one is shown
        self._held: dict[str, int] = {}  # kind of message → how many were held back since the last one

    def tell(self, text: str) -> None:
        """Show a message, or count it."""
        head, _, details = text.partition("\n")
        head = _cut(head)
        kind = _NUMBER.sub("…", head)
        is_first, now = kind not in self._next, self._clock()
        if not is_first and now < self._next[kind]:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        self._next[kind] = now + _EVERY
        held = self._held.pop(kind, 0)
        self._show(f"{head} ({held} more like it before)" if held else head, "")
        if is_first and details.strip():
            lines = [_cut(line) for line in details.rstrip().splitlines()]
            shown = lines if len(lines) <= _MOST_LINES else ["…", *lines[-_MOST_LINES:]]
            self._show(textwrap.indent("\n".join(shown), "  "), "dim")

    def close(self) -> None:
        """Tell how many were held back to the end."""
        for kind, count in self._held.items():
            self._show(f"{count} more like it: {kind}", "")
        self._held.clear()


def _cut(line: str) -> str:
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + "…"
