"""Page-locking of shared memory, with a fake CUDA runtime."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from unidle.engine.collect.inference import PageLock


@pytest.mark.parametrize(("error", "warns", "n_unlocked"), [(0, False, 1), (712, False, 0), (2, True, 0)])
def test_pages_locked_by_other_code_are_not_unlocked(
    error: int, warns: bool, n_unlocked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: error, cudaHostUnregister=unlocked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # the allocation that clears the last CUDA error
    block = SimpleNamespace(memory=bytearray(64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lock = PageLock(block)  # type: ignore[arg-type]
    assert bool(caught) == warns
    lock.close()
    lock.close()
    assert len(unlocked) == n_unlocked
