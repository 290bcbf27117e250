"""The run folders of a `tensorboard_log`: PPO_1, PPO_2, …."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from unidle.config.convert import in_brief
from unidle.errors import UsageError


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
