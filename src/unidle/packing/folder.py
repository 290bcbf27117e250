"""The folder of a pack: the output of each job, and a summary."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path

from unidle.errors import UsageError

PACKS = Path("packs")
SUMMARY = "summary.json"


def new_folder(out: Path | None) -> Path:
    """Create the folder `out`, or packs/<date and time>; UsageError if that cannot be."""
    if out is not None:
        return _create(out)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in count(1):  # packs that start in the same second
        folder = PACKS / (stamp if number == 1 else f"{stamp}-{number}")
        if not folder.exists():
            return _create(folder)
    raise AssertionError


def _create(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be created ({error.strerror}); choose another --out.") from None
    if not is_empty:
        raise UsageError(f"The folder {folder} is not empty; choose another --out.")
    return folder
