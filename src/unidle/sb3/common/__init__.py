"""The helper modules, under the names that they have in Stable-Baselines3."""

from typing import Any

from unidle.sb3.theirs import name_of_theirs


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
