"""Who locks the pages of a block, and who gives them back; CUDA's part is played here."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from unidle.engine.collect.inference import PageLock


@pytest.mark.parametrize(("error", "warned", "given_back"), [(0, False, 1), (712, False, 0), (2, True, 0)])
def test_pages_that_somebody_else_has_locked_are_theirs(
    error: int, warned: bool, given_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: error, cudaHostUnregister=unlocked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # by which CUDA's memory of an error is cleared
    block = SimpleNamespace(memory=bytearray(64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lock = PageLock(block)  # type: ignore[arg-type]
    assert bool(caught) == warned
    lock.close()
    lock.close()
    assert len(unlocked) == given_back
