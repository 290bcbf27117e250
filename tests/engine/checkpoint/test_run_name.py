"""`--resume auto`: the same command starts a run, and resumes it when it is started again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_envs import Choice
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.cli.main import run as command_line
from unidle.config import Config
from unidle.config.resolve import chosen_by_unidle, resumed_job
from unidle.engine.checkpoint.run_folder import RunFolder

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 2,
    "net_arch": (8,),
    "timesteps": 128,
    "eval_every": 64,
    "eval_episodes": 1,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}
COMMAND = ["train", "--resume", "auto", "--env", "CartPole-v1", "--preset", "classic", "--n-steps", "32", "--quiet"]
COMMAND += ["--batch-size", "32", "--n-epochs", "1", "--net-arch", "8", "--eval-every", "0", "--device", "cpu"]
COMMAND += ["--no-tensorboard", "--no-subproc"]


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def steps(path: str) -> list[int]:
    return [record["step"] for record in unidle.load(path).records if record["kind"] == "iteration"]


def test_same_call_starts_stops_and_resumes_with_the_same_result() -> None:
    whole = unidle.train(Choice, run_name="whole", **SMALL)
    for expected in ([32], [32, 64, 96], [32, 64, 96, 128], [32, 64, 96, 128]):
        iterations = len(expected) if len(expected) == 1 else 2
        unidle.train(Choice, run_name="a", resume="auto", after_iteration=[StopAfter(iterations)], **SMALL)
        assert steps("runs/a") == expected
    one, other = final_state(whole.path), final_state(Path("runs/a"))
    assert_same(one, other)


def test_same_command_starts_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    command = [flag for flag in COMMAND if flag != "--quiet"]
    assert command_line([*command, "--run-name", "a", "--timesteps", "32"]) == 0
    assert "Resuming" not in capsys.readouterr().err
    assert command_line([*command, "--run-name", "a", "--timesteps", "64", "--threads", "2"]) == 0
    assert "Resuming runs/a." in capsys.readouterr().err
    assert steps("runs/a") == [32, 64]
    config = unidle.load("runs/a").config
    assert (config.run.timesteps, config.engine.threads) == (64, 2)


def test_other_recipe_is_refused_with_the_sentence_of_resume() -> None:
    unidle.train(Choice, run_name="a", **SMALL)
    for settings in ({"gamma": 0.5}, {"seed": 9}, {"n_envs": 4}):
        with pytest.raises(unidle.UsageError, match="A resumed run keeps its recipe, but "):
            unidle.train(Choice, run_name="a", resume="auto", **{**SMALL, **settings})
    with pytest.raises(unidle.UsageError, match="A resumed run keeps its recipe, but algo would change it"):
        unidle.train(
            Choice, run_name="a", resume="auto", algo="dqn", quiet=True, timesteps=128, device="cpu", n_steps=16
        )
    with pytest.raises(unidle.UsageError, match="A resumed run keeps its recipe, but env would change it"):
        unidle.train("CartPole-v1", run_name="a", resume="auto", **SMALL)


def test_default_name_is_used_if_only_one_run_has_it() -> None:
    for timesteps in (32, 64):
        assert command_line([*COMMAND, "--timesteps", str(timesteps)]) == 0
    (folder,) = Path("runs").iterdir()
    assert steps(str(folder)) == [32, 64]
    shutil.copytree(folder, folder.with_name(f"{folder.name}-10"))
    folder.with_name(f"{folder.name}-fine").mkdir()  # another name, not a number
    with pytest.raises(unidle.UsageError) as error:
        unidle.train("CartPole-v1", resume="auto", **SMALL)
    name = folder.name
    assert str(error.value) == f"--resume auto finds several runs in runs ({name} and {name}-10); add `run_name`."


def test_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run = unidle.train(Choice, run_name="a", **SMALL)
    for checkpoint in run.folder.checkpoints.iterdir():
        checkpoint.unlink()
    (tmp_path / "runs/b").mkdir()  # reserved, then killed
    for name in ("a", "b"):
        unidle.train(Choice, run_name=name, resume="auto", **SMALL)
        assert steps(f"runs/{name}") == [32, 64, 96, 128]


def test_overlap_that_unidle_chose_on_another_machine_is_kept() -> None:
    given = Config().with_values({"env": "CartPole-v1", "overlap": "auto"}, "test")
    started = given.with_values({"overlap": "strict", "run_name": "a"}, "test")
    here = given.with_values({"overlap": "off"}, "test")
    assert resumed_job(started, here, chosen_by_unidle(given), "runs/a").recipe.overlap == "strict"
    with pytest.raises(unidle.UsageError, match="overlap would change it"):
        resumed_job(started, here, chosen_by_unidle(here), "runs/a")


def test_another_process_that_trains_there_is_not_disturbed() -> None:
    run = unidle.train(Choice, run_name="a", **SMALL)
    folder = RunFolder.open(run.path)
    folder.lock()
    with pytest.raises(unidle.UsageError, match="Another process is training in"):
        unidle.train(Choice, run_name="a", resume="auto", **SMALL)
    folder.unlock()


def test_other_values_of_resume_are_errors() -> None:
    with pytest.raises(unidle.UsageError, match=r"`resume` is True; use \"auto\", or unidle.resume\(folder\)"):
        unidle.train(Choice, resume=True, **SMALL)  # type: ignore[arg-type]


def test_weights_of_resumed_job_do_not_depend_on_where_it_stopped() -> None:
    unidle.train(Choice, run_name="a", resume="auto", after_iteration=[StopAfter(3)], **SMALL)
    unidle.train(Choice, run_name="a", resume="auto", **SMALL)
    unidle.train(Choice, run_name="b", **SMALL)
    a, b = (final_state(Path("runs") / name)["algo"]["policy"] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
