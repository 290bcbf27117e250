"""Where the runs of a model keep their files: PPO_1, PPO_2, … in its `tensorboard_log`."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from itertools import count
from pathlib import Path

from unidle.config.convert import in_brief
from unidle.config.settings import Run
from unidle.errors import UsageError


class RunFolders:
    """The folder of the latest run; None if it keeps no files."""

    def __init__(self) -> None:
        self.latest: Path | None = None
        self._temporary: str | None = None

    def next(self, tensorboard_log: str | Path | None, run: Run, name: str, *, continues: bool) -> Path | None:
        """The folder of the next run: a new one, or the latest if it continues that run."""
        parent = None if tensorboard_log is None else Path(tensorboard_log)
        if parent is None and (run.eval_every or run.checkpoint_every or run.monitor_csv or run.wandb or run.trace):
            parent = self._temporary_folder()
        if parent is None:
            self.latest = None
        elif not continues or self.latest is None or self.latest.parent != parent:
            self.latest = reserve_folder(parent, name)
        return self.latest

    def _temporary_folder(self) -> Path:
        """For settings that need files, until the model is deleted."""
        if self._temporary is None:
            self._temporary = tempfile.mkdtemp(prefix="unidle-")
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return Path(self._temporary)


def reserve_folder(parent: Path, name: str) -> Path:
    """Create the folder `name`_1, or the one after the highest number, which no other process has created."""
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise UsageError(
            f"`tb_log_name` is {in_brief(name)}; use a plain folder name, and tensorboard_log for its parent folder."
        )
    numbered = re.compile(re.escape(name) + "_([0-9]+)")
    found = [numbered.fullmatch(path.name) for path in parent.iterdir()] if parent.is_dir() else []
    for number in count(1 + max((int(match[1]) for match in found if match), default=0)):
        path = parent / f"{name}_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"Cannot create the run folder {path} ({error.strerror}); pass another tensorboard_log or tb_log_name."
            ) from None
        return path
    raise AssertionError
