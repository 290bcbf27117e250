"""Helpers to stop a run and to compare two checkpoints bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder


def final_state(path: Path) -> dict[str, Any]:
    latest = RunFolder.open(path).latest()
    assert latest is not None
    return load_checkpoint(latest)


def assert_same(a: Any, b: Any, where: str = "checkpoint") -> None:
    """Assert equality bit for bit, except for clock readings."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in ("wall", "seconds"):
                assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (one, other) in enumerate(zip(a, b)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


class StopAfter:
    """A callback that stops the run after some iterations, as Ctrl-C would."""

    def __init__(self, iterations: int) -> None:
        self._left = iterations

    def __call__(self, context: unidle.CallbackContext) -> None:
        self._left -= 1
        if self._left == 0:
            context.stop()
