"""NVIDIA MPS: started privately, ended afterwards, and one that runs already is left as it is."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from fake_mps import FakeMps
from processes import is_running

from unidle.packing import mps as mps_module
from unidle.packing.mps import Mps


@pytest.fixture
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return fake


def test_daemon_is_started_in_a_private_folder_and_ended(fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # the daemon must not number the GPUs anew
    with Mps() as mps:
        pipes, logs = (Path(mps.environment[f"CUDA_MPS_{kind}_DIRECTORY"]) for kind in ("PIPE", "LOG"))
        assert mps.text == "on"
        assert fake_mps.calls[0] == f"start {pipes} {logs} devices="
        assert [stat.S_IMODE(path.stat().st_mode) for path in (pipes, logs, pipes.parent)] == [0o700] * 3
        pid = int((pipes / "pid").read_text())
        assert is_running(pid)
    assert fake_mps.calls[-2:] == ["quit", "ended"]
    assert not is_running(pid)
    assert not pipes.parent.exists()


def test_daemon_that_runs_already_is_used_and_left(fake_mps: FakeMps) -> None:
    pipes = fake_mps.folder / "default"
    daemon = subprocess.Popen(["nvidia-cuda-mps-control", "-f"])
    try:
        while not (pipes / "pid").exists():
            pass
        with Mps() as mps:
            assert mps.text == "on: its daemon was running already"
            assert mps.environment == {}
        assert daemon.poll() is None
        assert [call.split()[0] for call in fake_mps.calls] == ["start", "get_server_list"]
    finally:
        daemon.kill()
        daemon.wait()


def test_daemon_that_does_not_start_is_reported_with_its_last_words(fake_mps: FakeMps) -> None:
    fake_mps.break_start()
    with Mps() as mps:
        assert mps.text == "off: its daemon did not start (Failed to start: out of order)"
        assert mps.environment == {}


def test_daemon_that_does_not_quit_is_killed(fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_module, "_QUIT_S", 0.3)
    fake_mps.ignore_quit()
    with Mps() as mps:
        pid = int((Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]) / "pid").read_text())
    assert not is_running(pid)


def test_without_the_program_jobs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Mps() as mps:
        assert mps.text == "off: nvidia-cuda-mps-control is not installed"
        assert mps.environment == {}
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
