"""Engine files: their content, their precedence, and the note if they were tuned for another machine."""

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
from unidle.config.resolve import resolve_layers
from unidle.errors import UsageError

SMALL = ["--n-envs", "2", "--n-steps", "16", "--batch-size", "16", "--n-epochs", "1", "--net-arch", "8"]
SHORT = [*SMALL, "--timesteps", "32", "--eval-every", "0", "--quiet", "--no-tensorboard"]


def write_engine_file(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_engine_file_round_trip(tmp_path: Path) -> None:
    values = {**dataclasses.asdict(Engine()), "workers": 3, "pin_cores": True}
    machine = Machine(16, "NVIDIA H200")
    text = engine_yaml(values, machine, "two\nlines")
    assert text.startswith("# two\n# lines\nengine:\n")
    file = read_engine_file(write_engine_file(tmp_path, text))
    assert (file.values, file.machine) == (values, machine)


@pytest.mark.parametrize("text", ["engine:\n  workers: 3\n  graphs: false\n", "workers: 3\ngraphs: false\n"])
def test_engine_section_is_optional(text: str, tmp_path: Path) -> None:
    file = read_engine_file(write_engine_file(tmp_path, text))
    assert file.values == {"workers": 3, "graphs": False}
    assert file.machine is None
    assert file.note(lambda: pytest.fail("the GPU must not be queried")) is None


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_invalid_engine_file_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    path = write_engine_file(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_engine_file(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_engine_file_of_another_machine_is_used_with_note(tmp_path: Path) -> None:
    this_machine = Machine(available_cores(), None)
    path = write_engine_file(tmp_path, engine_yaml({"workers": 3}, this_machine, "this machine"))
    layers = resolve_layers("classic", None, False)
    assert layers.with_engine(read_engine_file(path), lambda: None).notes == layers.notes
    path = write_engine_file(tmp_path, engine_yaml({"workers": 3}, Machine(999, "NVIDIA H200"), "another machine"))
    resolved = layers.with_engine(read_engine_file(path), lambda: None)
    assert resolved.config.engine.workers == 3
    (note,) = resolved.notes
    assert note.startswith(
        f"{path} was tuned for 999 cores and an NVIDIA H200, but this machine has {this_machine.cores} core"
    )
    assert "and no GPU; run `unidle tune`" in note


def test_engine_file_overrides_config_file_and_flags_override_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("engine: {slices: 4, env_timeout: 60, threads: 1}\nrecipe: {gamma: 0.9}\n")
    write_engine_file(tmp_path, "slices: 2\nmax_env_restarts: 3\nsubproc: false\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", "--config", "config.yaml", *SHORT]
    assert command_line([*argv, "--engine", "engine.yaml", "--max-env-restarts", "5", "--run-name", "a"]) == 0
    config = load_yaml(tmp_path / "runs/a/config.yaml")
    engine = config.engine
    assert (engine.slices, engine.env_timeout, engine.max_env_restarts, engine.subproc) == (2, 60, 5, False)
    assert config.recipe.gamma == 0.9
    assert command_line([*argv, "--engine", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.endswith("There is no file nowhere.yaml; check the path.\n")


def test_resumed_run_accepts_engine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_engine_file(tmp_path, "subproc: false\nmax_env_restarts: 3\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", *SHORT, "--run-name", "a"]
    assert command_line(argv) == 0
    more = ["train", "--resume", "runs/a", "--engine", "engine.yaml", "--timesteps", "64", "--quiet"]
    assert command_line(more) == 0
    engine = load_yaml(tmp_path / "runs/a/config.yaml").engine
    assert (engine.subproc, engine.max_env_restarts) == (False, 3)


def test_resume_notes_engine_file_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_engine_file(tmp_path, "engine: {max_env_restarts: 3}\nmachine: {cores: 999, gpu: null}\n")
    argv = ["train", "--env", "cli_envs:Choice", "--preset", "classic", *SHORT, "--run-name", "a"]
    assert command_line(argv) == 0
    capsys.readouterr()
    assert command_line(["train", "--resume", "runs/a", "--engine", "engine.yaml", "--timesteps", "64", "--quiet"]) == 0
    assert capsys.readouterr().err.startswith("engine.yaml was tuned for 999 cores and no GPU, but this machine has ")


def test_train_accepts_engine_file(tmp_path: Path) -> None:
    path = write_engine_file(tmp_path, "max_env_restarts: 3\n")
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
