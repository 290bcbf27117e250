"""The lock of a run folder."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from unidle.config import Config
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import UsageError


def test_process_forked_during_training_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", Config())
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        with pytest.raises(UsageError, match="Another process is training"):
            RunFolder.open(folder.path).lock()
        folder.unlock()  # as when this process ends, without a word to the child
        again = RunFolder.open(folder.path)
        again.lock()
        assert child.is_alive()
        again.unlock()
    finally:
        child.kill()
        child.join()
