"""Atomic file writes."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, page: str) -> Path:
    """Write `page` to `path` so that a browser that reloads never sees a partial file; returns `path`."""
    temporary = path.parent / f"{path.name}.tmp"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path
