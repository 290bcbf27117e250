"""Films of toy episodes, written by the command and read back frame by frame."""

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
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("env", ["cli_envs:Film", "cli_envs:SelfMadeFilm"])
@pytest.mark.parametrize("seed", [None, 3, 4])
def test_video_shows_every_moment_of_the_first_episode(
    env: str, seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unidle.train(env, **SMALL)
    flags = [] if seed is None else ["--seed", str(seed)]
    assert command(["eval", "runs/a", "--episodes", "2", "--video", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["video"] == "runs/a/video.mp4"
    frames = iio.imread("runs/a/video.mp4")
    steps = run.evaluate(2, seed=seed).lengths[0]
    assert frames.shape == (steps + 1, 32, 48, 3)  # what it began with, and what each step led to; sides made even
    brightness = frames.mean((1, 2, 3))
    assert brightness == pytest.approx([25 * step for step in range(steps + 1)], abs=4)
    assert iio.immeta("runs/a/video.mp4")["fps"] == 20


def test_the_first_episode_depends_on_the_seed() -> None:
    run = unidle.train("cli_envs:Film", **SMALL)
    assert len({run.evaluate(1, seed=seed).lengths[0] for seed in (1, 3, 4)}) > 1


@pytest.mark.parametrize("env", ["cli_envs:Dark", "cli_envs:Choice"])
def test_an_environment_that_renders_nothing_gets_a_sentence(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    unidle.train(env, **SMALL)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 2
    said = capsys.readouterr().err
    assert said == f"unidle: {env} does not render images; create it with render_mode='rgb_array' in its factory.\n"
    assert not Path("runs/a/video.mp4").exists()


def test_without_the_packages_the_sentence_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unidle.train("cli_envs:Film", **SMALL)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 2
    assert "pip install 'unidle[video]'" in capsys.readouterr().err


def test_a_policy_with_masks_is_filmed_too(capsys: pytest.CaptureFixture[str]) -> None:
    unidle.train("cli_envs:MaskedFilm", **SMALL)
    assert command(["eval", "runs/a", "--episodes", "1", "--video"]) == 0
    assert len(iio.imread("runs/a/video.mp4")) >= 4
    assert "video       runs/a/video.mp4" in capsys.readouterr().out
