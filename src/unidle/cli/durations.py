"""Durations as flags: 90s, 5m or 1h."""

from __future__ import annotations

import re

from unidle.errors import UsageError

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def seconds_of(flag: str, text: str) -> float:
    """The seconds in `text`; UsageError that names `flag` if it is not a duration."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if not found or found[2] not in _UNITS:
        raise UsageError(f"{flag} {text} is not a duration; use, for example, 90s, 5m or 1h.")
    return float(found[1]) * _UNITS[found[2]]
