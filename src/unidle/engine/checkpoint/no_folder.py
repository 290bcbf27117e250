"""A run that keeps no files, because whoever started it continues with its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidle.config import Config
from unidle.engine.checkpoint.run_folder import RunFolder


class NoFolder(RunFolder):
    """In place of the run folder: nothing is read or written."""

    is_kept = has_checkpoints = False

    def __init__(self) -> None:
        super().__init__(Path("no run folder"))

    def save_config(self, config: Config, step: int = 0) -> None:
        """Write nothing."""

    def lock(self) -> None:
        """Nothing can be written by two processes."""

    def load_latest(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """No checkpoint."""
        return None
