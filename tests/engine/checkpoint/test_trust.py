"""Runs of other users: the code that their config.yaml names is imported only with the user's consent."""

from __future__ import annotations

import json
import os
import pty
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unidle
from unidle.cli.main import run as command_line
from unidle.config import Config
from unidle.config.files import load_yaml
from unidle.engine.checkpoint import trust
from unidle.engine.checkpoint.trust import named_code, untrusted_code
from unidle.errors import UsageError

HOSTILE = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()
from cli_envs import Choice
from custom_networks import wide
from gymnasium.wrappers import RecordEpisodeStatistics
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder, and a working directory with a module that leaves a mark when imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_signed_here", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    yield tmp_path
    sys.modules.pop("hostile", None)


@pytest.fixture(scope="module")
def cartpole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names no code."""
    settings: dict[str, Any] = {"timesteps": 32, "n_steps": 32, "batch_size": 32, "eval_every": 0}
    return unidle.train(
        "CartPole-v1", preset="classic", runs_dir=str(tmp_path_factory.mktemp("r")), quiet=True, **settings
    ).path


def become_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process, and the state folder, remember is gone."""
    monkeypatch.setenv("XDG_STATE_HOME", f"{os.environ['XDG_STATE_HOME']}-of-another")
    trust._signed_here.clear()
    sys.modules.pop("hostile", None)


def train(name: str = "a", env: str = "hostile:Choice", **settings: Any) -> Path:
    short = {"preset": "classic", "timesteps": 32, "n_steps": 32, "batch_size": 32, "eval_every": 0, "quiet": True}
    run = unidle.train(env, run_name=name, tensorboard=False, **{**short, **settings})
    Path("imported").unlink(missing_ok=True)
    sys.modules.pop("hostile", None)
    return run.path


def was_imported() -> bool:
    return Path("imported").exists()


COMMANDS = {
    "eval": ["eval", "{}", "--episodes", "1"],
    "export": ["export", "{}"],
    "resume": ["train", "--resume", "{}", "--timesteps", "64", "--quiet"],
}
NAMING = {
    "env": {"env": "hostile:Choice"},
    "registered id": {"env": "hostile:Choice-v0"},
    "wrappers": {"env": "CartPole-v1", "wrappers": ["hostile:RecordEpisodeStatistics"]},
    "wrapper with arguments": {
        "env": "CartPole-v1",
        "wrappers": [{"hostile:RecordEpisodeStatistics": {"buffer_length": 10}}],
    },
    "network": {"env": "CartPole-v1", "network": "hostile:wide"},
}


@pytest.mark.parametrize(
    ("naming", "command"),
    [
        *((naming, command) for naming in NAMING for command in ("eval", "resume")),
        ("env", "export"),
        ("network", "export"),
    ],
)
def test_foreign_run_is_not_imported(
    naming: str, command: str, cartpole_run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(cartpole_run, home / "foreign")
    settings = NAMING[naming]
    config = load_yaml(run / "config.yaml").with_values(settings, "test")
    (run / "config.yaml").write_text(config.to_yaml())
    code = command_line([word.format(run) for word in COMMANDS[command]])
    if command == "export" and naming != "network":  # it does not create environments
        assert code == 0
    else:
        errors = capsys.readouterr().err.splitlines()
        assert (code, len(errors)) == (2, 1)
        assert "was not created by you on this machine" in errors[0]
        assert "hostile:" in errors[0]
        assert "--trust" in errors[0]
    assert not was_imported()


def test_system_call_in_a_config_is_shown_and_not_executed(
    cartpole_run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(cartpole_run, home / "foreign")
    config = load_yaml(run / "config.yaml")
    attack = config.with_values({"env": "os:system", "env_kwargs": {"command": "touch imported"}}, "test")
    (run / "config.yaml").write_text(attack.to_yaml())
    assert command_line(["eval", str(run)]) == 2
    assert "env 'os:system' with {'command': 'touch imported'}" in capsys.readouterr().err
    with pytest.raises(UsageError, match="trust=True"):
        unidle.load(run).evaluate(1)
    with pytest.raises(UsageError, match="trust=True"):
        unidle.resume(run, timesteps=64)
    assert not was_imported()


def test_own_run_is_trusted_also_moved_and_copied(home: Path) -> None:
    run = train(network="hostile:wide", wrappers=["hostile:RecordEpisodeStatistics"])
    trust._signed_here.clear()  # as in a new process
    moved = run.rename(home / "moved")
    copied = shutil.copytree(moved, home / "copied")
    for path in (moved, copied):
        assert command_line(["eval", str(path), "--episodes", "1"]) == 0
        assert unidle.resume(path, timesteps=64, quiet=True).path == path


@pytest.mark.parametrize(
    "change",
    [{"env": "hostile:Other"}, {"env_kwargs": {"x": 1}}, {"wrappers": ["hostile:Other"]}, {"network": "hostile:Other"}],
)
def test_signatures_hold_for_the_names_that_were_signed(change: dict[str, Any], home: Path) -> None:
    path = train(network="hostile:wide", wrappers=["hostile:RecordEpisodeStatistics"])
    trust._signed_here.clear()
    config = load_yaml(path / "config.yaml")
    assert untrusted_code(path, config) == {}
    changed = config.with_values(change, "test")
    assert list(untrusted_code(path, changed)) == [name.replace("env_kwargs", "env") for name in change]


def test_trust_is_remembered_for_what_was_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(network="hostile:wide")
    become_another_user(monkeypatch)
    assert unidle.load(run, trust=True).agent.step == 32  # imports the network only
    trust._signed_here.clear()
    assert unidle.load(run).agent.step == 32
    with pytest.raises(UsageError, match="import and run the env 'hostile:Choice'; if"):
        unidle.load(run).evaluate(1)
    assert command_line(["eval", str(run), "--episodes", "1", "--trust"]) == 0
    trust._signed_here.clear()
    assert command_line(["train", "--resume", str(run), "--timesteps", "64", "--quiet"]) == 0


def test_objects_passed_in_python_need_no_trust(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli_envs import Choice
    from custom_networks import wide

    run = train(network="hostile:wide")
    become_another_user(monkeypatch)
    given: dict[str, Any] = {"env": Choice, "network": wide}
    assert unidle.load(run, **given).evaluate(1).episodes == 1
    assert unidle.resume(run, timesteps=64, quiet=True, **given).agent.step == 64
    assert not was_imported()
    with pytest.raises(UsageError, match="import and run the network 'hostile:wide'"):
        unidle.load(run, env=Choice)


def test_names_of_unidle_and_gymnasium_need_no_trust() -> None:
    for env in ("CartPole-v1", "unidle/Mission-v0", "metaworld:MT10", "brax:ant", "envpool:CartPole-v1", "<lambda>"):
        assert named_code(Config().with_values({"env": env}, "test")) == {}, env
    own = Config().with_values({"network": "unidle.nn.link_network:LinkNetwork"}, "test")
    assert named_code(own) == {}
    for env in ("unidle.envs.make:env_maker", "os:system", "mine:Env-v0", "metaworld:", ":"):
        assert list(named_code(Config().with_values({"env": env}, "test"))) == ["env"], env


@pytest.mark.parametrize("state", ["file", "not a file", "readable by others", "too short", "link"])
def test_training_works_without_a_usable_key(state: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trained can evaluate and load its run; another one asks."""
    place = home / "broken"
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    key = place / "unidle" / "signing-key"
    if state == "file":
        place.touch()  # no folder can be created
    else:
        key.parent.mkdir(parents=True)
        (home / "other").write_bytes(bytes(32))
        (home / "other").chmod(0o600)
        {"not a file": key.mkdir, "link": lambda: key.symlink_to(home / "other")}.get(state, key.touch)()
        if state == "readable by others":
            key.write_bytes(bytes(32))
            key.chmod(0o640)
        elif state == "too short":
            key.write_bytes(bytes(31))
            key.chmod(0o600)
    path = train()
    assert unidle.load(path).evaluate(1).episodes == 1
    trust._key.cache_clear()
    trust._signed_here.clear()
    with pytest.raises(UsageError, match="--trust"):
        unidle.load(path).evaluate(1)


def test_key_is_private_and_the_same_for_processes_that_start_together(home: Path) -> None:
    code = "from unidle.engine.checkpoint import trust; print(trust._key(trust._state_folder()).hex())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1
    folder = home / "state" / "unidle"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "signing-key")] == [0o700, 0o600]
    assert list(folder.iterdir()) == [folder / "signing-key"]


def test_key_is_not_created_for_runs_that_name_no_code(home: Path) -> None:
    path = train(env="CartPole-v1")
    assert unidle.load(path).evaluate(1).episodes == 1
    assert not (home / "state").exists()
    assert not (path / ".signatures").exists()


@pytest.mark.parametrize("content", ["", "[]", "[" * 5000, '{"env": 1}', '{"env": "\\ud800"}', '{"env": "ab"}', "\0"])
def test_damaged_signatures_are_not_trusted(content: str, home: Path) -> None:
    path = train()
    trust._signed_here.clear()
    (path / ".signatures").write_text(content)
    assert list(untrusted_code(path, load_yaml(path / "config.yaml"))) == ["env"]


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2)])
def test_terminal_user_is_asked_to_trust_the_run(
    answer: str, code: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train()
    become_another_user(monkeypatch)
    terminal, child = pty.openpty()
    command = [sys.executable, "-m", "unidle", "eval", str(run), "--episodes", "1", "--json"]
    paths = os.pathsep.join([str(home), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command, stdin=child, stderr=child, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        os.close(child)
        shown = ""
        while "[y/N]" not in shown:
            shown += os.read(terminal, 1000).decode()
        assert "env: 'hostile:Choice'" in shown
        assert not was_imported()
        os.write(terminal, f"{answer}\n".encode())
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
    assert (process.returncode, "error" in result) == (code, code == 2)
    assert was_imported() == (code == 0)
    os.close(terminal)
