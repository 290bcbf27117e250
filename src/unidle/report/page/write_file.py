"""A page into a file."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, page: str) -> Path:
    """Write `page` to `path`, so that a browser that reloads meanwhile never sees half of it; returns `path`."""
    fresh = path.parent / f"{path.name}.tmp"
    fresh.write_text(page, encoding="utf-8")
    os.replace(fresh, path)
    return path
