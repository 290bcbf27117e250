"""Asks whether to import the code that is named in the config of a run that you did not create."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from unidle.config import Config


def is_trusted(folder: Path, settings: Iterable[str], flag: bool, config: Config | None = None) -> bool:
    """Whether to trust the code that these settings name: by the flag, or by asking in a terminal.

    `config` is that of a folder which is not a run.
    """
    from unidle.engine.checkpoint.run_folder import RunFolder
    from unidle.engine.checkpoint.trust import untrusted_code

    if flag or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return flag
    found = untrusted_code(folder, config or RunFolder.open(folder).config(), settings)
    if not found:
        return False
    print(f"{folder} was not created by you on this machine. Its config imports and runs:", file=sys.stderr)
    for name, text in found.items():
        print(f"  {name}: {text}", file=sys.stderr)
    print("Do you trust it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
