"""A run that goes on with other settings notes which, and where, for charts to show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unidle
from unidle.engine.checkpoint.kernel_versions import kernels_on
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint, save_checkpoint
from unidle.report.dashboard.runs import whole_view

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 1,
    "net_arch": (8,),
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
    "device": "cpu",
}


def noted(folder: Path) -> list[dict[str, Any]]:
    path = folder / "changes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stopped(runs: Path) -> Path:
    """A run that was stopped after its first iteration."""
    settings = {**SMALL, "timesteps": 6400, "runs_dir": str(runs), "run_name": "x"}
    return unidle.train("CartPole-v1", after_iteration=[lambda context: context.stop()], **settings).path


def go_on(folder: Path, **settings: Any) -> None:
    unidle.resume(folder, quiet=True, after_iteration=[lambda context: context.stop()], **settings)


def test_settings_that_differ_are_noted_at_the_checkpoint_and_shown(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    assert noted(folder) == []
    go_on(folder)
    go_on(folder, timesteps=12_800)
    assert noted(folder) == []  # the same settings, or only more of the same

    latest = RunFolder.open(folder).latest()
    assert latest is not None
    wall = load_checkpoint(latest)["wall"]
    go_on(folder, graphs=False, eval_episodes=3, timesteps=6400)
    (line,) = noted(folder)
    assert line == {
        "step": 3 * 64,
        "seconds": pytest.approx(wall),
        "change": "graphs true → false, timesteps 12800 → 6400, eval_episodes 10 → 3",
    }
    go_on(folder, workers=1, subproc=True)
    assert [(r["step"], r["change"]) for r in noted(folder)][1:] == [(4 * 64, "subproc auto → true, workers auto → 1")]
    assert [marker["steps"] for marker in whole_view(folder)[0]["changes"]] == [3 * 64, 4 * 64]


def test_what_was_noted_past_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    folder = stopped(tmp_path)
    early = {"step": 64, "seconds": 0.1, "change": "a"}
    (folder / "changes.jsonl").write_text("".join(json.dumps({**early, "step": step}) + "\n" for step in (64, 65)))
    go_on(folder)
    assert noted(folder) == [early]


def test_other_kernels_than_before_are_told_and_noted_and_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(tmp_path)
    path = RunFolder.open(folder).latest()
    assert path is not None
    state = load_checkpoint(path)
    here = state["kernels"]
    assert here == f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}"
    there = "torch 2.11.0, Triton 3.6.0, NVIDIA H200"
    save_checkpoint(path, {**state, "kernels": there})
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])
    assert f"({there} → {here})" in capsys.readouterr().err.replace("\n", " ")
    assert [(r["step"], r["change"]) for r in noted(folder)] == [(64, f"kernels {there} → {here}")]
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])  # now it is computed as it was
    assert "The kernels that compute" not in capsys.readouterr().err
    assert len(noted(folder)) == 1


class Crash(Exception):
    """Ends a run without a checkpoint."""


def crash(context: unidle.CallbackContext) -> None:
    raise Crash


def test_kernels_are_noted_once_however_often_a_run_is_resumed_before_it_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tmp_path)
    here = kernels_on(torch.device("cpu"))

    def go_on_with(kernels: str, **settings: Any) -> list[str]:
        monkeypatch.setattr("unidle.engine.trainer.kernels_on", lambda device: kernels)
        with pytest.raises(Crash):
            unidle.resume(folder, quiet=True, after_iteration=[crash], **settings)
        assert {r["step"] for r in noted(folder)} == {64}
        return [r["change"] for r in noted(folder)]

    first = f"graphs true → false, kernels {here} → torch 9, CPU"
    assert go_on_with("torch 9, CPU", graphs=False) == [first]
    assert go_on_with("torch 9, CPU") == [first]
    assert go_on_with("torch 9, CPU", graphs=True) == [first, "graphs false → true"]
    assert go_on_with("torch 9, CPU") == [first, "graphs false → true"]
    assert go_on_with(here)[2:] == [f"kernels torch 9, CPU → {here}"]  # nothing that others computed was kept
    assert len(go_on_with(here)) == 3


def test_before_the_first_step_there_is_nothing_to_note(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 6400, "runs_dir": str(tmp_path), "run_name": "x"}
    with pytest.raises(Crash):
        unidle.train("CartPole-v1", after_iteration=[crash], **settings)
    go_on(tmp_path / "x", graphs=False)
    assert noted(tmp_path / "x") == []


def test_on_a_cpu_kernels_hang_on_its_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert kernels_on(torch.device("cpu")) == f"torch {torch.__version__}, CPU AVX2"


def test_a_checkpoint_that_does_not_tell_its_kernels_is_gone_on_with_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(tmp_path)
    path = RunFolder.open(folder).latest()
    assert path is not None
    save_checkpoint(path, {name: value for name, value in load_checkpoint(path).items() if name != "kernels"})
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])
    assert "The kernels that compute" not in capsys.readouterr().err
    assert noted(folder) == []


@pytest.mark.parametrize(("runs", "words"), [(True, "Triton 3.6.0"), (False, "no Triton")])
def test_kernels_of_a_gpu_hang_on_triton_and_the_gpu(runs: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.engine.checkpoint.kernel_versions.has_own_kernels", lambda: runs)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    assert kernels_on(torch.device("cuda")) == f"torch {torch.__version__}, {words}, NVIDIA H200"
