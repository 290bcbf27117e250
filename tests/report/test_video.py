"""Videos of episodes, written by `unidle eval --video` and read back frame by frame."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import pytest

import unidle
from unidle.cli.main import run as command

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 1,
    "n_steps": 8,
    "batch_size": 8,
    "n_epochs": 1,
    "net_arch": (8,),
    "timesteps": 8,
    "eval_every": 0,
    "tensorboard": False,
    "run_name": "a",
    "quiet": True,
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("env", ["cli_envs:RenderingEnv", "cli_envs:FixedRenderModeEnv"])
@pytest.mark.parametrize("seed", [None, 3, 4])
def test_video_has_a_frame_for_every_step_of_first_episode(
    env: str, seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unidle.train(env, **SMALL)
    flags = [] if seed is None else ["--seed", str(seed)]
    assert command(["eval", "runs/a", "--episodes", "2", "--video", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["video"] == "runs/a/video.mp4"
    frames = iio.imread("runs/a/video.mp4")
    steps = run.evaluate(2, seed=seed).lengths[0]
    assert frames.shape == (steps + 1, 32, 48, 3)  # the first observation and one frame per step; sizes rounded to even
    brightness = frames.mean((1, 2, 3))
    assert brightness == pytest.approx([25 * step for step in range(steps + 1)], abs=4)
    assert iio.immeta("runs/a/video.mp4")["fps"] == 20


def test_first_episode_depends_on_seed() -> None:
    run = unidle.train("cli_envs:RenderingEnv", **SMALL)
    assert len({run.evaluate(1, seed=seed).lengths[0] for seed in (1, 3, 4)}) > 1


@pytest.mark.parametrize("env", ["cli_envs:NonRenderingEnv", "cli_envs:Choice"])
def test_env_that_does_not_render_is_an_error(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    unidle.train(env, **SMALL)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 2
    output = capsys.readouterr().err
    assert output == f"unidle: {env} does not render images; create it with render_mode='rgb_array' in its factory.\n"
    assert not Path("runs/a/video.mp4").exists()


def test_missing_video_packages_error_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unidle.train("cli_envs:RenderingEnv", **SMALL)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 2
    assert "pip install 'unidle[video]'" in capsys.readouterr().err


def test_masked_policy_can_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    unidle.train("cli_envs:MaskedRenderingEnv", **SMALL)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 0
    assert len(iio.imread("runs/a/video.mp4")) >= 4
    assert "video       runs/a/video.mp4" in capsys.readouterr().out
