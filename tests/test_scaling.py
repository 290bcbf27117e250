"""`unidle scaling`: critics of several widths are trained with one actor, and plotted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from task_envs import MultiTaskWalk

import unidle
from unidle.cli.main import run as command_line
from unidle.scaling import Point, chart, compare

SMALL: dict[str, Any] = {
    "preset": "sac",
    "n_tasks": 3,
    "n_envs": 3,
    "n_steps": 8,
    "batch_size": 15,
    "net_arch": (16, 16),
    "buffer_size": 900,
    "learning_starts": 60,
    "utd_ratio": 0.2,
    "timesteps": 240,
    "eval_episodes": 6,
    "subproc": False,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}


def test_each_width_is_trained_once_and_reports_final_evaluation(tmp_path: Path) -> None:
    trained: list[int] = []

    def train(width: int) -> unidle.TrainedRun:
        trained.append(width)
        widths = {"critic_arch": (width, width), "run_name": str(width), "runs_dir": str(tmp_path)}
        return unidle.train(MultiTaskWalk, **SMALL, **widths)

    points = compare((8, 4, 8), train)
    assert trained == [4, 8]
    for point in points:
        run = unidle.load(tmp_path / str(point.critic), env=MultiTaskWalk)
        final = [record for record in run.records if record["kind"] == "evaluation"][-1]
        assert (point.step, point.success) == (240, final["eval/success"])
        assert (point.dormant, point.mean_return) == (final["plasticity/critic/dormant"], final["eval/return_mean"])


def test_run_is_complete_only_with_evaluation_of_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "scaling-mt10-actor8-critic4-seed0"
    run = unidle.train(MultiTaskWalk, **SMALL, run_name=name, runs_dir=str(tmp_path))
    resumed: list[dict[str, Any]] = []

    def resume_and_stop(path: Path, **settings: Any) -> unidle.TrainedRun:
        resumed.append(settings)
        return unidle.load(path)

    monkeypatch.setattr("unidle.api.resume", resume_and_stop)
    monkeypatch.setattr("unidle.api.train", lambda *_, **settings: pytest.fail(f"{settings['run_name']} was started"))
    argv = ["scaling", "--actor", "8", "--critic", "4,5", "--runs-dir", str(tmp_path)]
    assert command_line(argv) == 1  # a short run does not count as the preset's, and the next width is not started
    assert "Stopped; run the same command again to continue." in capsys.readouterr().err
    assert [(each["timesteps"], each["eval_episodes"]) for each in resumed] == [(20_000_000, 500)]
    assert command_line([*argv[:4], "4", *argv[5:], "--timesteps", "240"]) == 0
    assert len(resumed) == 1
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"evaluation", "step": 240' not in line))
    assert command_line([*argv, "--timesteps", "240"]) == 1  # as after Ctrl-C during the last evaluation
    assert len(resumed) == 2


def test_chart_shows_success_and_dormant_neurons_against_width() -> None:
    measured = [(200, 0.25, 0.05), (400, 0.5, None), (1024, 0.75, 0.3)]
    points = [Point(width, 9, success, dormant, 1.0, "run") for width, success, dormant in measured]
    svg = chart(points, "MT10, actor 400 wide")
    assert svg.startswith("<svg xmlns=")
    tips = re.findall("<title>(.*?)</title>", svg, re.DOTALL)
    assert "critic width: 1,024\nsuccess: 75 %" in tips
    assert "critic width: 200\ndormant critic neurons: 5.0 %" in tips
    assert not any("400\ndormant" in tip for tip in tips)  # None: not measured before the first update


def test_command_trains_plots_and_skips_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("metaworld")
    small = ["--timesteps", "100", "--eval-episodes", "1", "--no-subproc", "--no-save-replay-buffer", "--json"]
    argv = ["scaling", "--actor", "8", "--critic", "4", "--runs-dir", str(tmp_path), *small]
    assert command_line(argv) == 0
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    (point,) = output["points"]
    assert (point["critic"], point["step"], point["dormant"]) == (4, 100, None)
    assert Path(output["plot"]).read_text().startswith("<svg")
    config = unidle.load(point["run"]).config
    assert (config.recipe.net_arch, config.recipe.critic_arch) == ((8,) * 3, (4,) * 3)
    assert config.run.preset == "mt10-paper-400"
    before = (Path(point["run"]) / "metrics.jsonl").stat().st_mtime_ns
    assert command_line(argv) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == output
    assert (Path(point["run"]) / "metrics.jsonl").stat().st_mtime_ns == before


def test_zero_width_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["scaling", "--critic", "0"]) == 2
    assert "need widths of at least 1" in capsys.readouterr().err
