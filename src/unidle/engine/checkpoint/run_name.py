"""The folder of a run: its name, and which existing run the same command resumes (`--resume auto`)."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.files import display_path, refuse_second_run
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import UsageError

_MAX_NAME_BYTES = 255  # of a folder, on common file systems


def new_path(config: Config, cwd: Path, last: str | None = None) -> Path:
    """The folder for a new run, as an absolute path: with the user's name, or with the next free one.

    `last` replaces the seed at the end of the default name, for a group of runs.
    """
    parent = cwd / config.run.runs_dir
    if config.run.run_name is None:
        return RunFolder.reserve(parent, _default_name(config, last))
    path = parent / _checked(config.run.run_name)
    refuse_second_run(path)
    return path


def planned_path(config: Config, cwd: Path, last: str | None = None) -> Path:
    """The folder that `new_path` would give now; nothing is created."""
    if config.run.run_name is not None:
        return new_path(config, cwd, last)
    parent, name = cwd / config.run.runs_dir, _default_name(config, last)
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in numbered if not path.exists())


def existing_path(config: Config, cwd: Path, last: str | None = None, file: str = "config.yaml") -> Path | None:
    """The folder of the run that this config started before; None if there is none. UsageError if there are several.

    For a group of runs, `last` is as for `new_path`, and `file` is what its folder has.
    """
    parent = cwd / config.run.runs_dir
    if config.run.run_name is not None:
        paths = [parent / _checked(config.run.run_name)]
    else:
        name = _default_name(config, last)
        numbered = re.compile(re.escape(name) + r"-([2-9]|[1-9]\d+)")
        found = parent.iterdir() if parent.is_dir() else ()
        paths = sorted(path for path in found if path.name == name or numbered.fullmatch(path.name))
    runs = [path for path in paths if (path / file).exists()]
    if len(runs) > 1:
        names = " and ".join(path.name for path in runs[:3]) + " and others" * (len(runs) > 3)
        raise UsageError(f"--resume auto finds several runs in {display_path(parent)} ({names}); add --run-name.")
    return runs[0] if runs else None


def _checked(name: str) -> str:
    if not name.isprintable() or "/" in name or name in ("", ".", "..") or len(name.encode()) > _MAX_NAME_BYTES:
        raise UsageError(
            f"`run_name` is {in_brief(name)}; use a plain folder name of at most {_MAX_NAME_BYTES} bytes, and "
            "--runs-dir for its parent folder."
        )
    return name


def _default_name(config: Config, last: str | None = None) -> str:
    run = config.run
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", run.env).strip("-")  # <Corridor>: Corridor
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{env}-{config.recipe.algo}-{run.preset}-{last or f'seed{run.seed}'}")
    return name[-_MAX_NAME_BYTES // 2 :].strip("-")
