"""Packages that register environments when they are imported, to suggest `package:id` for an unknown id."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

# First word of an id → package, where the package is not named after it.
_PACKAGES = {
    "ALE": "ale_py",
    "Adroit": "gymnasium_robotics",
    "AntMaze": "gymnasium_robotics",
    "BabyAI": "minigrid",
    "Fetch": "gymnasium_robotics",
    "FrankaKitchen": "gymnasium_robotics",
    "Hand": "gymnasium_robotics",
    "MiniWorld": "miniworld",
    "Meta": "metaworld",
    "PandaReach": "panda_gym",
    "Panda": "panda_gym",
    "PointMaze": "gymnasium_robotics",
    "dm_control": "shimmy",
    "highway": "highway_env",
    "merge": "highway_env",
    "parking": "highway_env",
    "roundabout": "highway_env",
}


def package_of(env_id: str) -> str | None:
    """The installed package that probably registers `env_id`; None if there is none."""
    word = re.split(r"[-/]", env_id, maxsplit=1)[0]
    longest = max((prefix for prefix in _PACKAGES if word.startswith(prefix)), key=len, default="")
    names = [_PACKAGES.get(longest), word.lower(), f"{word.lower()}_env", f"gym_{word.lower()}", f"{word.lower()}_gym"]
    return next((name for name in names if name and name.isidentifier() and _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names or name in ("gymnasium", "test", "tests", "unidle"):
        return False
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
