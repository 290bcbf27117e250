"""robots.txt (RFC 9309): the longest matching rule decides, with `*` and `$`, in groups by user agent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

MAX_BYTES = 512_000  # the RFC's minimum; the rest is ignored


class Rule(NamedTuple):
    """A parsed pattern; every link of every page is matched against it."""

    first: str  # prefix of the path
    rest: tuple[str, ...]  # parts that follow in this order, each after a `*`
    to_the_end: bool  # `$`
    allowed: bool

    @staticmethod
    def of(pattern: str, allowed: bool) -> Rule:
        """Parse a pattern."""
        first, *rest = pattern.removesuffix("$").split("*")
        return Rule(first, tuple(rest), pattern.endswith("$"), allowed)

    def matches(self, path: str) -> bool:
        """Whether it matches this path. A regular expression could backtrack for ever on `/*a*a*a*b`."""
        if not path.startswith(self.first):
            return False
        at, last = len(self.first), len(self.rest) - 1
        for index, part in enumerate(self.rest):
            if self.to_the_end and index == last:
                return path.endswith(part) and len(path) - len(part) >= at
            at = path.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return not self.to_the_end or at == len(path)


@dataclass(frozen=True)
class Robots:
    """The rules of one site for one crawler."""

    rules: tuple[Rule, ...] = ()  # in order of precedence
    delay: float = 0.0  # Crawl-delay in seconds (not in the RFC, but common)

    @staticmethod
    def parse(text: str, agent: str) -> Robots:
        """Parse the groups for `agent`, or those for `*` if there are none."""
        groups: dict[str, list[tuple[str, str]]] = {}
        named: list[str] = []  # the agents whose group this is
        in_rules = False
        for line in text.removeprefix("\ufeff").splitlines():
            field, _, value = line.partition("#")[0].partition(":")
            field, value = field.strip().lower(), value.strip()
            if field == "user-agent":
                if in_rules:
                    named, in_rules = [], False
                named.append(value.partition("/")[0].strip().lower())
                groups.setdefault(named[-1], [])
            elif field in ("allow", "disallow", "crawl-delay"):
                in_rules = True
                for name in named:
                    groups[name].append((field, value))
        lines = groups.get(agent.lower(), groups.get("*", []))
        rules = [(unquote(value), field == "allow") for field, value in lines if field != "crawl-delay" and value]
        rules.sort(key=lambda rule: (len(rule[0]), rule[1]), reverse=True)
        delays = [_seconds(value) for field, value in lines if field == "crawl-delay"]
        return Robots(tuple(Rule.of(*rule) for rule in rules), max(delays, default=0.0))

    def allows(self, path: str) -> bool:
        """Whether a path, with its query, may be fetched."""
        if not self.rules or path == "/robots.txt":
            return True
        plain = unquote(path) if "%" in path else path
        for rule in self.rules:
            if rule.matches(plain):
                return rule.allowed
        return True


EVERYTHING = Robots()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
