"""The story of an episode, as an environment tells it: a small file in the run folder, for the report to draw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

STORY = "page_graph.json"


def write_story(folder: Path, step: int, story: dict[str, Any]) -> Path:
    """Write it in the place of the last one; `step` is that of the policy that played."""
    path, fresh = folder / STORY, folder / f"{STORY}.tmp"
    fresh.write_text(json.dumps({"step": step, **story}), encoding="utf-8")
    os.replace(fresh, path)  # whoever reads it meanwhile never sees half of it
    return path
