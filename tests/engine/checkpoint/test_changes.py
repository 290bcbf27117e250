"""changes.jsonl: settings and kernels that changed when a run was resumed, for the dashboard's charts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint
from unidle.engine.checkpoint.kernel_versions import kernels_on
from unidle.engine.checkpoint.run_folder import RunFolder
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


def recorded_changes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "changes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start_stopped_run(runs: Path) -> Path:
    """The folder of a run that was stopped after its first iteration."""
    settings = {**SMALL, "timesteps": 6400, "runs_dir": str(runs), "run_name": "x"}
    return unidle.train("CartPole-v1", after_iteration=[lambda context: context.stop()], **settings).path


def resume_one_iteration(folder: Path, **settings: Any) -> None:
    unidle.resume(folder, quiet=True, after_iteration=[lambda context: context.stop()], **settings)


def test_changed_settings_are_recorded_and_shown_in_dashboard(tmp_path: Path) -> None:
    folder = start_stopped_run(tmp_path)
    assert recorded_changes(folder) == []
    resume_one_iteration(folder)
    resume_one_iteration(folder, timesteps=12_800)
    assert recorded_changes(folder) == []  # unchanged settings, or only more steps

    latest = RunFolder.open(folder).latest()
    assert latest is not None
    wall = load_checkpoint(latest)["wall"]
    resume_one_iteration(folder, graphs=False, eval_episodes=3, timesteps=6400)
    (line,) = recorded_changes(folder)
    assert line == {
        "step": 3 * 64,
        "seconds": pytest.approx(wall),
        "change": "graphs true → false, timesteps 12800 → 6400, eval_episodes 10 → 3",
    }
    resume_one_iteration(folder, workers=1, subproc=True)
    assert [(r["step"], r["change"]) for r in recorded_changes(folder)][1:] == [
        (4 * 64, "subproc auto → true, workers auto → 1")
    ]
    assert [marker["steps"] for marker in whole_view(folder)[0]["changes"]] == [3 * 64, 4 * 64]


def test_changed_lists_are_recorded_as_the_flag_takes_them(tmp_path: Path) -> None:
    folder = start_stopped_run(tmp_path)
    resume_one_iteration(folder, log_info=("x", "y"))
    assert [r["change"] for r in recorded_changes(folder)] == ["log_info none → x,y"]


def test_changes_after_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    folder = start_stopped_run(tmp_path)
    early = {"step": 64, "seconds": 0.1, "change": "a"}
    (folder / "changes.jsonl").write_text("".join(json.dumps({**early, "step": step}) + "\n" for step in (64, 65)))
    resume_one_iteration(folder)
    assert recorded_changes(folder) == [early]


def test_changed_kernels_are_reported_and_recorded_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = start_stopped_run(tmp_path)
    path = RunFolder.open(folder).latest()
    assert path is not None
    state = load_checkpoint(path)
    current = state["kernels"]
    assert current == f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}"
    previous = "torch 2.11.0, Triton 3.6.0, NVIDIA H200"
    save_checkpoint(path, {**state, "kernels": previous})
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])
    assert f"({previous} → {current})" in capsys.readouterr().err.replace("\n", " ")
    assert [(r["step"], r["change"]) for r in recorded_changes(folder)] == [(64, f"kernels {previous} → {current}")]
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])  # the kernels have not changed since
    assert "The kernels that compute" not in capsys.readouterr().err
    assert len(recorded_changes(folder)) == 1


class Crash(Exception):
    """Ends a run without a checkpoint."""


def crash(context: unidle.CallbackContext) -> None:
    raise Crash


def test_change_is_recorded_once_if_resumes_crash_before_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start_stopped_run(tmp_path)
    original = kernels_on(torch.device("cpu"))

    def resume_and_crash(kernels: str, **settings: Any) -> list[str]:
        monkeypatch.setattr("unidle.engine.trainer.kernels_on", lambda device: kernels)
        with pytest.raises(Crash):
            unidle.resume(folder, quiet=True, after_iteration=[crash], **settings)
        assert {r["step"] for r in recorded_changes(folder)} == {64}
        return [r["change"] for r in recorded_changes(folder)]

    first = f"graphs true → false, kernels {original} → torch 9, CPU"
    assert resume_and_crash("torch 9, CPU", graphs=False) == [first]
    assert resume_and_crash("torch 9, CPU") == [first]
    assert resume_and_crash("torch 9, CPU", graphs=True) == [first, "graphs false → true"]
    assert resume_and_crash("torch 9, CPU") == [first, "graphs false → true"]
    assert resume_and_crash(original)[2:] == [f"kernels torch 9, CPU → {original}"]  # no checkpoint used the others
    assert len(resume_and_crash(original)) == 3


# -- another learning rate ---------------------------------------------------------------------------------------------


def rates(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["train/learning_rate"]) for r in unidle.load(folder).records if r["kind"] == "iteration"]


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_resumed_run_continues_with_another_learning_rate(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {} if algo == "ppo" else {"preset": "dqn", "n_epochs": None, "learning_starts": 0}
    settings = {name: value for name, value in {**SMALL, **own}.items() if value is not None}
    settings |= {"learning_rate": 1e-3, "timesteps": 128, "runs_dir": str(tmp_path), "run_name": "x"}
    folder = unidle.train("CartPole-v1", **settings).path
    capsys.readouterr()
    unidle.resume(folder, quiet=True, learning_rate=1e-4, timesteps=192)
    assert rates(folder) == [(64, pytest.approx(1e-3)), (128, pytest.approx(1e-3)), (192, pytest.approx(1e-4))]
    said = "From step 128 on, this run continues with learning_rate 0.0001 (was 0.001)."
    assert said in capsys.readouterr().err
    (change,) = recorded_changes(folder)
    assert change["settings"] == {"learning_rate": 1e-4}
    assert (change["step"], change["change"]) == (128, "learning_rate 0.001 → 0.0001, timesteps 128 → 192")
    assert "from step 128 on learning_rate 0.001 → 0.0001" in (folder / "report.html").read_text()
    unidle.resume(folder, quiet=True, timesteps=256, lr_schedule="linear")
    assert rates(folder)[-1] == (256, pytest.approx(1e-4 * 0.25))
    assert "lr_schedule linear (was constant)" in capsys.readouterr().err
    unidle.resume(folder, quiet=True, timesteps=320)
    assert unidle.load(folder).config.recipe.learning_rate == 1e-4
    assert len(recorded_changes(folder)) == 2


@pytest.mark.parametrize("iterations", [0, 1])
def test_changed_learning_rate_survives_a_crash_before_the_next_checkpoint(tmp_path: Path, iterations: int) -> None:
    settings = {**SMALL, "timesteps": 6400, "runs_dir": str(tmp_path), "run_name": "x"}
    if iterations:
        folder = start_stopped_run(tmp_path)
    else:  # its only checkpoint is of step 0
        with pytest.raises(Crash):
            unidle.train("CartPole-v1", after_iteration=[crash], **settings)
        folder = tmp_path / "x"
    for changes in ({"learning_rate": 1e-4}, {}, {}):
        with pytest.raises(Crash):
            unidle.resume(folder, quiet=True, after_iteration=[crash], **changes)
    resume_one_iteration(folder)
    assert rates(folder)[-1] == (64 * iterations + 64, pytest.approx(1e-4))
    resume_one_iteration(folder)
    changes = [r["settings"] for r in recorded_changes(folder)]
    assert changes == [{"learning_rate": 1e-4}]


def test_change_of_learning_rate_is_recorded_again_if_its_checkpoint_is_damaged(tmp_path: Path) -> None:
    folder = start_stopped_run(tmp_path)
    resume_one_iteration(folder)
    resume_one_iteration(folder, learning_rate=1e-4)
    resume_one_iteration(folder)
    older, latest = RunFolder.open(folder).saved()
    older.rename(older.with_name(f"step-{64:012d}.pt"))  # as if an older one, with the former learning rate, was kept
    state = load_checkpoint(older.with_name(f"step-{64:012d}.pt"))
    first = {**state, "settings": state["settings"].replace("learning_rate: 0.0001", "learning_rate: 0.0003")}
    save_checkpoint(older.with_name(f"step-{64:012d}.pt"), {**first, "step": 64, "iteration": 1})
    latest.write_bytes(b"damaged")
    resume_one_iteration(folder)
    assert [(r["step"], r["settings"]) for r in recorded_changes(folder)] == [(64, {"learning_rate": 1e-4})]
    resume_one_iteration(folder)


def test_learning_rate_edited_in_config_file_is_refused(tmp_path: Path) -> None:
    folder = start_stopped_run(tmp_path)
    resume_one_iteration(folder, learning_rate=1e-4)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.0001", "learning_rate: 0.5"))
    with pytest.raises(unidle.UsageError, match=r"was edited.*`learning_rate` is 0.5, not 0.0001"):
        resume_one_iteration(folder)


def test_no_change_is_recorded_before_first_step(tmp_path: Path) -> None:
    settings = {**SMALL, "timesteps": 6400, "runs_dir": str(tmp_path), "run_name": "x"}
    with pytest.raises(Crash):
        unidle.train("CartPole-v1", after_iteration=[crash], **settings)
    resume_one_iteration(tmp_path / "x", graphs=False)
    assert recorded_changes(tmp_path / "x") == []


def test_cpu_kernel_version_includes_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert kernels_on(torch.device("cpu")) == f"torch {torch.__version__}, CPU AVX2"


def test_checkpoint_without_kernel_version_resumes_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = start_stopped_run(tmp_path)
    path = RunFolder.open(folder).latest()
    assert path is not None
    save_checkpoint(path, {name: value for name, value in load_checkpoint(path).items() if name != "kernels"})
    unidle.resume(folder, after_iteration=[lambda context: context.stop()])
    assert "The kernels that compute" not in capsys.readouterr().err
    assert recorded_changes(folder) == []


@pytest.mark.parametrize(("has_triton", "expected"), [(True, "Triton 3.6.0"), (False, "no Triton")])
def test_gpu_kernel_version_includes_triton_and_gpu(
    has_triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.checkpoint.kernel_versions.uses_triton_layers", lambda: has_triton)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    assert kernels_on(torch.device("cuda")) == f"torch {torch.__version__}, {expected}, NVIDIA H200"
