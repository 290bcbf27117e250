"""The trace of one evaluation episode, as reported by the environment: a small file that the report draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unidle.writing import write_atomically

TRACE_FILE = "page_graph.json"


def write_trace(folder: Path, step: int, trace: dict[str, Any]) -> Path:
    """Replace the previous trace; `step` is the step of the evaluated policy."""
    return write_atomically(folder / TRACE_FILE, json.dumps({"step": step, **trace}))
