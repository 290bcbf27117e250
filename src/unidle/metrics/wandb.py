"""Logs metrics to Weights & Biases."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from unidle.errors import UsageError
from unidle.writing import refuse_link


class WandbWriter:
    """A W&B run; resuming the run folder continues it."""

    def __init__(self, folder: Path, config: dict[str, Any], step: int = 0) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.") from None
        refuse_link(folder / "wandb")
        # The id identifies the folder: a resumed run continues in W&B; another run of the same name is a new one.
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        name = folder.name
        try:
            self._run: Any = wandb.init(
                project="unidle", name=name, id=f"{name}-{place}", config=config, dir=str(folder), resume="allow"
            )
        except wandb.errors.UsageError:
            raise UsageError("Not logged in to W&B; run `wandb login`, or set WANDB_MODE=offline.") from None
        self._latest = step

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics; W&B steps never go back, so a late evaluation is logged now, with its step in `at_step`."""
        self._latest = max(self._latest, step)
        self._run.log({**metrics, "at_step": step}, step=self._latest)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()
