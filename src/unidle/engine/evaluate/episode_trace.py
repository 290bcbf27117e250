"""The trace of one evaluation episode, as reported by the environment: a small file that the report draws."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TRACE_FILE = "page_graph.json"


def write_trace(folder: Path, step: int, trace: dict[str, Any]) -> Path:
    """Replace the last trace; `step` is that of the policy that was evaluated."""
    path, temporary = folder / TRACE_FILE, folder / f"{TRACE_FILE}.tmp"
    temporary.write_text(json.dumps({"step": step, **trace}), encoding="utf-8")
    os.replace(temporary, path)  # atomic: readers never see half a file
    return path
