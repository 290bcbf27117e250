"""Logs metrics to Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unidle.errors import UsageError
from unidle.metrics.tags import Tag, with_tags
from unidle.writing import refuse_link, write_atomically

_IDENTITY = ("id", "project", "entity")


class WandbWriter:
    """A W&B run; resuming the run folder continues it.

    W&B's environment variables override the project, name, id and folder chosen here.
    """

    def __init__(self, folder: Path, config: dict[str, Any], step: int = 0, tags: Sequence[Tag] = ()) -> None:
        """`tags` are logged in addition to unidle's names."""
        try:
            import wandb
        except ImportError:
            raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.") from None
        file = folder / "wandb.json"
        identity = _identity(file, folder, step)
        if identity:
            identity["resume"] = "allow"
        else:
            identity = {
                "id": os.environ.get("WANDB_RUN_ID") or _new_id(folder.name),
                "project": os.environ.get("WANDB_PROJECT") or "unidle",
                "name": os.environ.get("WANDB_NAME") or folder.name,
                "resume": os.environ.get("WANDB_RESUME") or "allow",
            }
        if not os.environ.get("WANDB_DIR"):
            refuse_link(folder / "wandb")
            identity["dir"] = str(folder)
        try:
            run: Any = wandb.init(config=config, **identity)
        except (wandb.errors.Error, ValueError) as error:  # ValueError: of a variable
            if "API key" in str(error):
                raise UsageError("Not logged in to W&B; run `wandb login`, or set WANDB_MODE=offline.") from None
            raise UsageError(f"W&B could not start ({error}); check the WANDB_ variables.") from None
        if not run.disabled:
            write_atomically(file, json.dumps({name: getattr(run, name) for name in _IDENTITY}) + "\n")
        # Plotted against environment steps: W&B's own steps never go back, and a late evaluation would be misplaced.
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        self._run, self._tags = run, tags
        self._global_step = self._row = step  # of the latest row, and its W&B step

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics; those of the same step share a row."""
        if step != self._global_step:
            self._global_step, self._row = step, max(step, self._row + 1)
        self._run.log({**with_tags(step, metrics, self._tags), "global_step": step}, step=self._row)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def _new_id(name: str) -> str:
    """An id that shows the run's name, without characters that W&B refuses."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:64]}-{secrets.token_hex(4)}"


def _identity(file: Path, folder: Path, step: int) -> dict[str, Any]:
    """The W&B run that this folder's run continues; empty if it has none yet."""
    try:
        stored = json.loads(file.read_bytes())
        return {name: stored[name] for name in _IDENTITY if stored[name] is not None}
    except OSError:
        if step == 0:
            return {}
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{file} is damaged; delete it, and the run continues as a new W&B run.") from None
    # Earlier versions stored nothing, and derived the id from the folder.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return {"id": f"{folder.name}-{place}", "project": "unidle"}
