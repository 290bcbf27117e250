"""Weights & Biases offline runs: their tags, settings from W&B's environment variables, and resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record, RunRecord

from unidle.errors import UsageError
from unidle.metrics.tags import SB3_TAGS
from unidle.metrics.wandb import WandbWriter

_BLOCK, _HEADER = 1 << 15, 7


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()  # it reads the variables once per process


def records_in(path: Path) -> list[Record]:
    """All records of a `.wandb` file, once W&B's service has written the last one."""
    deadline = time.monotonic() + 30
    while not (found := parsed(path)) or not found[-1].HasField("exit"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def parsed(path: Path) -> list[Record]:
    """The records so far; the format is LevelDB's log: blocks of chunks (checksum, length, kind, content)."""
    content, at, record, found = path.read_bytes(), _HEADER, b"", []
    while at + _HEADER < len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(record))
            record = b""
    return found


def logs(folder: Path) -> list[Path]:
    """The logs of W&B's runs in a folder, oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def run_in(path: Path) -> RunRecord:
    return next(record.run for record in records_in(path) if record.HasField("run"))


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The logged rows, without W&B's own values."""
    rows = []
    for record in records_in(path):
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in row.items() if not name.startswith("_") or name == "_step"})
    return rows


def write(folder: Path, *steps: int, start: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    writer = WandbWriter(folder, {"seed": 1}, start)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def test_rows_have_tags_of_other_tools_and_global_step(tmp_path: Path) -> None:
    writer = WandbWriter(tmp_path, {}, tags=SB3_TAGS)
    writer.write(64, {"iteration": 1.0, "wall": 2.0, "rollout/return_mean": 20.0})
    writer.write(64, {"eval/return_mean": 30.0, "wall": 2.0})
    writer.close()
    (log,) = logs(tmp_path)
    (row,) = rows_in(log)
    assert row == {
        "_step": 64,
        "global_step": 64,
        "iteration": 1.0,
        "wall": 2.0,
        "rollout/return_mean": 20.0,
        "rollout/ep_rew_mean": 20.0,
        "eval/return_mean": 30.0,
        "eval/mean_reward": 30.0,
        "time/fps": 32.0,
        "time/iterations": 1.0,
        "time/time_elapsed": 2.0,
        "time/total_timesteps": 64.0,
    }


def test_late_evaluation_does_not_move_training_metrics(tmp_path: Path) -> None:
    writer = WandbWriter(tmp_path, {})
    for step, metrics in ((1, {"a": 1.0}), (2, {"a": 2.0}), (1, {"eval": 5.0}), (3, {"a": 3.0}), (4, {"a": 4.0})):
        writer.write(step, metrics)
    writer.close()
    (log,) = logs(tmp_path)
    rows = [{name: value for name, value in row.items() if name != "_step"} for row in rows_in(log)]
    assert rows == [
        {"a": 1.0, "global_step": 1},
        {"a": 2.0, "global_step": 2},
        {"eval": 5.0, "global_step": 1},
        {"a": 3.0, "global_step": 3},
        {"a": 4.0, "global_step": 4},
    ]
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in records_in(log) if r.HasField("metric")}
    assert axes["*"] == "global_step"


def test_without_variables_run_has_name_of_folder_and_project_unidle(tmp_path: Path) -> None:
    write(tmp_path / "my#run", 64)
    (log,) = logs(tmp_path / "my#run")
    run = run_in(log)
    assert (run.project, run.display_name) == ("unidle", "my#run")
    assert run.run_id.startswith("my-run-")


def test_environment_variables_are_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    variables = {
        "PROJECT": "p",
        "ENTITY": "e",
        "NAME": "n",
        "TAGS": "t,u",
        "RUN_GROUP": "g",
        "RUN_ID": "i",
        "DIR": str(elsewhere),
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    elsewhere.mkdir()
    write(tmp_path / "run", 64)
    assert logs(tmp_path / "run") == []
    (log,) = logs(elsewhere)
    run = run_in(log)
    assert (run.project, run.entity, run.display_name, run.run_id, run.run_group) == ("p", "e", "n", "i", "g")
    assert list(run.tags) == ["t", "u"]


def test_disabled_mode_logs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(tmp_path, 64)
    assert list(tmp_path.iterdir()) == []


def test_resumed_run_continues_whatever_its_folder_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "p")
    write(tmp_path / "run", 64)
    (log,) = logs(tmp_path / "run")
    first = run_in(log)
    monkeypatch.setenv("WANDB_PROJECT", "other")
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    (tmp_path / "run").rename(tmp_path / "moved")
    write(tmp_path / "moved", 128, start=64)
    *_, log = logs(tmp_path / "moved")
    second = run_in(log)
    assert (second.run_id, second.project) == (first.run_id, "p")
    assert [row["global_step"] for row in rows_in(log)] == [128]


def test_run_of_an_earlier_version_keeps_its_id(tmp_path: Path) -> None:
    write(tmp_path, 64, start=32)
    (log,) = logs(tmp_path)
    assert run_in(log).run_id.startswith(f"{tmp_path.name}-")
    again = tmp_path / "wandb.json"
    before = again.read_text()
    again.unlink()
    write(tmp_path, 64, start=32)
    assert again.read_text() == before


def test_new_run_in_the_same_place_is_another_run(tmp_path: Path) -> None:
    write(tmp_path, 64)
    first = json.loads((tmp_path / "wandb.json").read_text())["id"]
    (tmp_path / "wandb.json").unlink()
    write(tmp_path, 64)
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] != first


@pytest.mark.parametrize("content", ["{", "[]", "{}", "null"], ids=["cut", "list", "empty", "null"])
def test_damaged_identity_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "wandb.json").write_text(content)
    with pytest.raises(UsageError, match=r"wandb\.json is damaged; delete it, and the run continues as a new W&B run"):
        WandbWriter(tmp_path, {}, 64)


@pytest.mark.parametrize(("name", "value"), [("MODE", "never"), ("RUN_ID", "a/b")], ids=["mode", "id"])
def test_invalid_variable_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(UsageError, match=r"^W&B could not start \((.|\n)*\); check the WANDB_ variables\.$"):
        WandbWriter(tmp_path, {})


def test_missing_login_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    with pytest.raises(UsageError, match=r"^Not logged in to W&B; run `wandb login`, or set WANDB_MODE=offline\.$"):
        WandbWriter(tmp_path, {})
