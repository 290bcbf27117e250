"""Run folders of earlier versions: the policy loads, and a resume is refused with the version to use.

`run_of_0_1_0` is a run folder that unidle 0.1.0 wrote (CartPole-v1, 256 steps).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import unidle

OLD_RUN = Path(__file__).parent / "run_of_0_1_0"
OBSERVATION = np.array([0.01, 0.2, -0.03, -0.1], np.float32)


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN, tmp_path / "old"))


def test_old_policy_loads_and_predicts_same_action(old_run: Path) -> None:
    run = unidle.load(old_run)
    assert run.predict(OBSERVATION) == (1, None)  # as predicted by unidle 0.1.0
    assert run.agent.step == 128


def test_old_policy_can_be_evaluated(old_run: Path) -> None:
    run = unidle.load(old_run)
    assert run.evaluate(2).episodes == 2
    assert run.summary()["step"] == 256


def test_resuming_old_run_is_rejected_with_version_to_use(old_run: Path) -> None:
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    with pytest.raises(unidle.UsageError, match=r"was written by unidle 0\.1\.0; resume it with that version"):
        unidle.resume(old_run, timesteps=512, quiet=True)
    assert all(path.read_bytes() == content for path, content in before.items())
