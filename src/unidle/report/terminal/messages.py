"""Messages on the terminal or in the log, with repeated ones rate-limited."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable

_EVERY = 10.0  # seconds between two similar messages
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_MAX_LINES = 30  # of details; the end of a traceback matters most
_MAX_CHARACTERS = 1000  # of a line


class Messages:
    """Shows messages and suppresses repeats; messages that differ only in numbers count as similar.

    An environment that fails often would otherwise flood the terminal with the same traceback. So details after the
    first line are shown once, and similar messages once every ten seconds with the number of suppressed ones. All
    faults are in metrics.jsonl.
    """

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`show` receives a text and its rich style."""
        self._show, self._clock = show, clock
        self._next: dict[str, float] = {}  # kind of message → when the next one is shown
        self._suppressed: dict[str, int] = {}  # kind of message → number suppressed since the last one

    def show(self, text: str) -> None:
        """Show a message, or count it as suppressed."""
        head, _, details = text.partition("\n")
        head = _cut(head)
        kind = _NUMBER.sub("…", head)
        is_first, now = kind not in self._next, self._clock()
        if not is_first and now < self._next[kind]:
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return
        self._next[kind] = now + _EVERY
        suppressed = self._suppressed.pop(kind, 0)
        self._show(f"{head} ({suppressed} similar messages not shown)" if suppressed else head, "")
        if is_first and details.strip():
            lines = [_cut(line) for line in details.rstrip().splitlines()]
            shown = lines if len(lines) <= _MAX_LINES else ["…", *lines[-_MAX_LINES:]]
            self._show(textwrap.indent("\n".join(shown), "  "), "dim")

    def close(self) -> None:
        """Show how many messages are still suppressed."""
        for kind, count in self._suppressed.items():
            self._show(f"{count} similar messages not shown: {kind}", "")
        self._suppressed.clear()


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else line[:_MAX_CHARACTERS] + "…"
