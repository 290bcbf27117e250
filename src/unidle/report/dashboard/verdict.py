"""The verdict on a run in one sentence: what its GPU waited for most or, without one, where the trainer's time went."""

from __future__ import annotations

from collections.abc import Mapping

from unidle.formatting import percent
from unidle.report.dashboard.segments import Segment

NOT_METERED = "Nothing has been measured yet."
_BUSY = 0.9  # above this there is little to gain
_MIN_SECOND_CAUSE = 0.15  # of the idle time, for a second cause
_CAUSES = {
    "environment": "waiting for environments",
    "host→device": "copying to the GPU",
    "inference": "launching inference",
    "device→host": "copying from the GPU",
    "storage": "storing experience",
    "learn (launch)": "launching the learner's kernels",
    "sync": "synchronising",
    "checkpoint": "writing checkpoints",
    "logging": "logging",
    "other": "other host work",
    "unattributed": "unattributed time",
}
_PHASES = {
    "environment": "environments",
    "inference": "inference",
    "storage": "storing experience",
    "learn": "learning",
    "sync": "waiting for the device",
    "evaluate": "evaluations",
    "checkpoint": "checkpoints",
    "logging": "logging",
    "other": "other work",
    "unattributed": "unattributed work",
}
_PARTS = {"rollout": "in rollouts", "learning": "in learning", "both": "while they overlap"}


def verdict(whole: Segment | None) -> str:
    """Return the verdict on a run so far."""
    if whole is None:
        return NOT_METERED
    if whole.gpu is None:
        spent = _listed(whole.host, _PHASES, 3, ("of its time on", "on"))
        return f"No GPU was measured; the trainer thread spent {spent}."
    busy = whole.gpu["busy"]
    if busy >= _BUSY:
        return f"GPU busy {percent(busy)}: there is little left to gain."
    idle = 1 - busy
    causes = {name: share / idle for name, share in whole.gpu.items() if name != "busy"}
    return f"GPU busy {percent(busy)}; of the idle {percent(idle)}, {_listed(causes, _CAUSES, 2, ('went to', 'to'))}."


def parts_text(whole: Segment) -> str:
    """15 % at 125 W in rollouts, 95 % at 208 W in learning, 35 % overall."""
    if whole.gpu is None:
        return ""
    parts = [
        f"{_known(part.busy)}{_power(part.watts)} {_PARTS[name]}"
        for name, part in whole.parts.items()
        if name in _PARTS  # the table has the rest
    ]
    return ", ".join([*parts, f"{percent(whole.gpu['busy'])}{_power(whole.readings.get('watts'))} overall"])


def _listed(shares: Mapping[str, float], words: Mapping[str, str], most: int, links: tuple[str, str]) -> str:
    """Return the largest share, and other large ones, as text."""
    largest = sorted(shares, key=lambda name: -shares[name])[:most]
    named = [name for name in largest if name == largest[0] or shares[name] >= _MIN_SECOND_CAUSE]
    items = [f"{percent(shares[name])} {links[name != named[0]]} {words.get(name, name)}" for name in named]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _known(share: float | None) -> str:
    return "–" if share is None else percent(share)


def _power(watts: float | None) -> str:
    return "" if watts is None else f" at {watts:.0f} W"
