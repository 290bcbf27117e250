"""robots.txt (RFC 9309): the longest matching rule decides, with `*` and `$`, in groups by user agent.

The file may be hostile, so parsing and matching take linear time: rules without wildcards are looked up by their
length, and all others are matched together, in one pass over the path.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import unquote

MAX_BYTES = 512_000  # the RFC's minimum; the rest is ignored
MAX_PATTERN_CHARACTERS = 8_192  # in all rules with wildcards; each costs time at every character of a path


class TooComplexError(Exception):
    """The rules of a robots.txt would take too long to obey."""


@dataclass(frozen=True)
class Patterns:
    """Rules with `*` or `$` as one automaton, simulated with one bit per state (Baeza-Yates and Gonnet, 1992).

    The states of a pattern are consecutive: state i has read its first i characters. Later patterns take precedence.
    """

    rules: tuple[tuple[int, bool], ...] = ()  # (length, allowed) of each pattern, in ascending order
    starts: int = 0  # the first state of each pattern
    loops: int = 0  # states that read any characters: at a `*`, and at the end of a pattern without `$`
    ends: tuple[int, ...] = ()  # the last state of each pattern
    steps: dict[str, int] = field(default_factory=dict)  # character → states that it leads out of

    @staticmethod
    def of(rules: list[tuple[str, bool]]) -> Patterns:
        """Build the automaton."""
        if sum(len(pattern) for pattern, _ in rules) > MAX_PATTERN_CHARACTERS:
            raise TooComplexError(f"more than {MAX_PATTERN_CHARACTERS:,} characters in rules with wildcards")
        rules = sorted(rules, key=lambda rule: (len(rule[0]), rule[1]))
        starts = loops = state = 0
        ends = []
        steps: dict[str, int] = defaultdict(int)
        for pattern, _ in rules:
            starts |= 1 << state
            for character in pattern.removesuffix("$"):
                if character == "*":
                    loops |= 1 << state
                else:
                    steps[character] |= 1 << state
                    state += 1
            if not pattern.endswith("$"):
                loops |= 1 << state
            ends.append(state)
            state += 1
        return Patterns(tuple((len(pattern), allowed) for pattern, allowed in rules), starts, loops, tuple(ends), steps)

    def match(self, path: str) -> tuple[int, bool] | None:
        """The (length, allowed) of the pattern that takes precedence; None if none matches."""
        states, loops, steps = self.starts, self.loops, self.steps
        for character in path:
            states = (states & steps.get(character, 0)) << 1 | states & loops
            if not states:
                return None
        return next((rule for rule, end in zip(self.rules[::-1], self.ends[::-1]) if states >> end & 1), None)


@dataclass(frozen=True)
class Robots:
    """The rules of one site for one crawler."""

    prefixes: dict[str, bool] = field(default_factory=dict)  # rules without wildcards: path prefix → allowed
    lengths: tuple[int, ...] = ()  # of the prefixes, longest first
    patterns: Patterns = Patterns()
    delay: float = 0.0  # Crawl-delay in seconds (not in the RFC, but common)

    @staticmethod
    def parse(text: str, agent: str) -> Robots:
        """Parse the groups for `agent`, or those for `*` if there are none; TooComplexError if they are too complex."""
        own: list[tuple[str, str]] | None = None  # None: there is no such group
        default: list[tuple[str, str]] = []
        named: set[str] = set()  # the agents whose group this is
        in_rules = False
        for line in text.removeprefix("\ufeff").splitlines():
            name, _, value = line.partition("#")[0].partition(":")
            name, value = name.strip().lower(), value.strip()
            if name == "user-agent":
                if in_rules:
                    named, in_rules = set(), False
                named.add(value.partition("/")[0].strip().lower())
                if own is None and agent.lower() in named:
                    own = []
            elif name in ("allow", "disallow", "crawl-delay"):
                in_rules = True
                if own is not None and agent.lower() in named:
                    own.append((name, value))
                if "*" in named:
                    default.append((name, value))
        lines = default if own is None else own
        rules = [(unquote(value), name == "allow") for name, value in lines if name != "crawl-delay" and value]
        has_wildcards = [(rule, "*" in rule[0] or rule[0].endswith("$")) for rule in rules]
        prefixes: dict[str, bool] = {}
        for (prefix, allowed), is_pattern in has_wildcards:
            if not is_pattern:
                prefixes[prefix] = allowed or prefixes.get(prefix, False)
        lengths = sorted({len(prefix) for prefix in prefixes}, reverse=True)
        delays = [_seconds(value) for name, value in lines if name == "crawl-delay"]
        patterns = Patterns.of([rule for rule, is_pattern in has_wildcards if is_pattern])
        return Robots(prefixes, tuple(lengths), patterns, max(delays, default=0.0))

    def allows(self, path: str) -> bool:
        """Whether a path, with its query, may be fetched."""
        if path == "/robots.txt":
            return True
        plain = unquote(path) if "%" in path else path
        best = self.patterns.match(plain) if self.patterns.rules else None
        for length in self.lengths:
            allowed = self.prefixes.get(plain[:length])
            if allowed is not None and length <= len(plain):
                best = max(best or (0, False), (length, allowed))
                break
        return best is None or best[1]


ALLOW_ALL = Robots()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
