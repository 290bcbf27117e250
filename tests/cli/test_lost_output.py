"""Runs whose output cannot be written end as they would have, and lose nothing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import TESTS
from processes import restore_sigint, wait_until

PROGRAM = str(Path(sys.executable).with_name("unidle"))
SMALL = "--preset classic --n-envs 2 --n-steps 16 --batch-size 16 --n-epochs 1 --net-arch 8 --eval-episodes 2"
TRAIN = [PROGRAM, "train", "--env", "cli_envs:Choice", *SMALL.split(), "--run-name", "a"]


def process_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}


def steps_of(folder: Path) -> list[int]:
    """The steps of the iterations in metrics.jsonl."""
    path = folder / "runs/a/metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "iteration"]


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | head -n 1"])
def test_run_completes(redirection: str, tmp_path: Path) -> None:
    train = shlex.join([*TRAIN, "--timesteps", "960", "--subproc", "--workers", "2"])
    script = f"{{ {train}; echo $? > code; }} {redirection}"
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=process_env(), timeout=60)
    assert wait_until((tmp_path / "code").exists)
    assert (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "runs/a/checkpoints/step-000000000960.pt").exists()
    assert (tmp_path / "runs/a/report.html").exists()


def test_ctrl_c_saves_after_tee_was_killed(tmp_path: Path) -> None:
    train = [*TRAIN, "--timesteps", "100000000", "--eval-every", "64", "--no-subproc"]
    with subprocess.Popen(["tee", "log"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as tee:
        process = subprocess.Popen(
            train,
            cwd=tmp_path,
            env=process_env(),
            stdout=tee.stdin,
            stderr=subprocess.STDOUT,
            preexec_fn=restore_sigint,
        )
        assert tee.stdin is not None
        tee.stdin.close()
        try:
            assert wait_until(lambda: len(steps_of(tmp_path)) > 0)
            tee.kill()
            tee.wait()
            seen = steps_of(tmp_path)[-1]
            assert wait_until(lambda: steps_of(tmp_path)[-1] > seen + 320)  # it trains on, without output
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 128 + signal.SIGINT
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / f"runs/a/checkpoints/step-{steps_of(tmp_path)[-1]:012d}.pt").exists()
