"""Engine files: what they may hold, where they stand among the layers, and what they say of another machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cli_envs import Choice

import unidle
from unidle.cli.main import run as command_line
from unidle.config import Config, Engine
from unidle.config.engine_file import Machine, engine_yaml, read_engine_file
from unidle.config.files import load_yaml
from unidle.config.machine import available_cores
from unidle.config.resolve import lay
from unidle.errors import UsageError

SMALL = ["--n-envs", "2", "--n-steps", "16", "--batch-size", "16", "--n-epochs", "1", "--net-arch", "8"]
SHORT = [*SMALL, "--timesteps", "32", "--eval-every", "0", "--quiet", "--no-tensorboard"]


def written(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    values = {**dataclasses.asdict(Engine()), "workers": 3, "pin_cores": True}
    machine = Machine(16, "NVIDIA H200")
    text = engine_yaml(values, machine, "two\nlines")
    assert text.startswith("# two\n# lines\nengine:\n")
    file = read_engine_file(written(tmp_path, text))
    assert (file.values, file.machine) == (values, machine)


@pytest.mark.parametrize("text", ["engine:\n  workers: 3\n  graphs: false\n", "workers: 3\ngraphs: false\n"])
def test_settings_stand_in_a_section_or_by_themselves(text: str, tmp_path: Path) -> None:
    file = read_engine_file(written(tmp_path, text))
    assert file.values == {"workers": 3, "graphs": False}
    assert file.machine is None
    assert file.note(lambda: pytest.fail("nobody needs to know the GPU")) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "n_envs: 8\n",
            "`n_envs` is not an engine setting, and an engine file may contain nothing else; give it as a flag or in "
            "--config.",
        ),
        ("engine: {overlap: strict}\n", "`overlap` is not an engine setting"),
        ("recipe: {n_envs: 8}\n", "`recipe` is not an engine setting"),
        ("timesteps: 100\n", "`timesteps` is not an engine setting, and an engine file may contain nothing else"),
        ("engine: {wokers: 2}\n", "there is no setting `wokers`; did you mean `workers`?"),
        ("workers: many\n", "`workers` must be an integer or auto, not 'many'."),
        ("engine: 3\n", "`engine` must contain `name: value` lines."),
        ("machine: {cores: many}\n", "`machine` must contain `cores`, a number, and `gpu`, a name or null."),
    ],
)
def test_what_is_no_engine_setting_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_engine_file(path)
    assert str(error.value).startswith(f"{path}: {sentence}")
    assert "\n" not in str(error.value)


def test_a_file_made_for_another_machine_says_so_and_is_used_all_the_same(tmp_path: Path) -> None:
    here = Machine(available_cores(), None)
    path = written(tmp_path, engine_yaml({"workers": 3}, here, "here"))
    layers = lay("classic", None, False)
    assert layers.with_engine(read_engine_file(path), lambda: None).notes == layers.notes
    path = written(tmp_path, engine_yaml({"workers": 3}, Machine(999, "NVIDIA H200"), "there"))
    there = layers.with_engine(read_engine_file(path), lambda: None)
    assert there.config.engine.workers == 3
    (note,) = there.notes
    assert note.startswith(f"{path} was tuned for 999 cores and an NVIDIA H200, but this machine has {here.cores} core")
    assert "and no GPU; run `unidle tune`" in note


def test_it_overrides_preset_and_config_file_and_flags_override_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("engine: {slices: 4, env_timeout: 60, threads: 1}\nrecipe: {gamma: 0.9}\n")
    written(tmp_path, "slices: 2\nmax_env_restarts: 3\nsubproc: false\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", "--config", "config.yaml", *SHORT]
    assert command_line([*argv, "--engine", "engine.yaml", "--max-env-restarts", "5", "--run-name", "a"]) == 0
    config = load_yaml(tmp_path / "runs/a/config.yaml")
    engine = config.engine
    assert (engine.slices, engine.env_timeout, engine.max_env_restarts, engine.subproc) == (2, 60, 5, False)
    assert config.recipe.gamma == 0.9
    assert command_line([*argv, "--engine", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.endswith("There is no file nowhere.yaml; check the path.\n")


def test_a_resumed_run_may_take_one_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "subproc: false\nmax_env_restarts: 3\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", *SHORT, "--run-name", "a"]
    assert command_line(argv) == 0
    more = ["train", "--resume", "runs/a", "--engine", "engine.yaml", "--timesteps", "64", "--quiet"]
    assert command_line(more) == 0
    engine = load_yaml(tmp_path / "runs/a/config.yaml").engine
    assert (engine.subproc, engine.max_env_restarts) == (False, 3)


def test_a_resumed_run_is_told_if_it_was_made_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "engine: {max_env_restarts: 3}\nmachine: {cores: 999, gpu: null}\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", *SHORT, "--run-name", "a"]
    assert command_line(argv) == 0
    capsys.readouterr()
    assert command_line(["train", "--resume", "runs/a", "--engine", "engine.yaml", "--timesteps", "64", "--quiet"]) == 0
    assert capsys.readouterr().err.startswith("engine.yaml was tuned for 999 cores and no GPU, but this machine has ")


def test_python_takes_one_too(tmp_path: Path) -> None:
    path = written(tmp_path, "max_env_restarts: 3\n")
    run = unidle.train(
        Choice,
        preset="classic",
        engine=path,
        n_envs=2,
        n_steps=16,
        batch_size=16,
        n_epochs=1,
        net_arch=(8,),
        timesteps=32,
        eval_every=0,
        tensorboard=False,
        quiet=True,
        subproc=False,
        runs_dir=str(tmp_path),
    )
    assert (run.config.engine.max_env_restarts, run.config.engine.subproc) == (3, False)
    assert Config().engine.max_env_restarts == 10
