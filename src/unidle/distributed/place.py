"""Which rank of a data-parallel job this process is, as set by `torchrun` and `unidle train --gpus`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unidle.errors import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `size`, and number `local_rank` of the `local_size` ranks on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """The environment variables that say so."""
        return dict(zip(_VARIABLES, map(str, (self.rank, self.size, self.local_rank, self.local_size))))


def current_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process; None if it trains alone."""
    words = [environment.get(name, "") for name in _VARIABLES]
    if not all(word.isdecimal() for word in words):
        return None
    place = Place(*map(int, words))
    return place if place.size > 1 else None


def require_one_rank(what: str) -> None:
    """UsageError if `what`, which does not train on several ranks, runs in a data-parallel job."""
    if current_place() is not None:
        raise UsageError(f"{what} does not train on several ranks; start it without torchrun, --gpus and --ranks.")
