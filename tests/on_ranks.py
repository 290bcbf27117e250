"""Runs functions of `rank_functions.py` on the ranks of a real job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from unidle.distributed.launch import launch

_FUNCTIONS = Path(__file__).with_name("rank_functions.py")


def start(name: str, size: int, folder: Path, grace: float = 15.0, **arguments: Any) -> int:
    """The exit code of a job whose ranks call a function."""
    command = [sys.executable, str(_FUNCTIONS), name, str(folder), json.dumps(arguments)]
    return launch(command, size, lambda text: None, grace)


def results(name: str, size: int, folder: Path) -> list[Any]:
    """What each rank has returned; None if it has not."""
    files = [folder / f"{name}-{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def on_ranks(name: str, size: int, folder: Path, **arguments: Any) -> list[Any]:
    """What a function returns on each of `size` ranks."""
    assert start(name, size, folder, **arguments) == 0
    return results(name, size, folder)
