"""Numbers in info at the end of episodes, and one row per episode in monitor.csv."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from info_envs import AsyncCounts, Counts
from resumed_runs import StopAfter
from stable_baselines3.common.monitor import load_results

import unidle
from unidle.cli.main import run as command_line

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 3,
    "n_steps": 8,
    "batch_size": 24,
    "n_epochs": 1,
    "net_arch": (8,),
    "timesteps": 96,
    "eval_every": 0,
    "tensorboard": False,
    "device": "cpu",
    "subproc": False,
    "quiet": True,
}


def cartpoles() -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")


KEYS = ("steps", "is_long", "array", "sometimes")


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(env: Any = Counts, **settings: Any) -> unidle.TrainedRun:
    return unidle.train(env, **{**SMALL, "run_name": "a", **settings})


def info_of(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("info/")}


@pytest.mark.parametrize(
    ("env", "settings"),
    [(Counts, {}), (Counts, {"subproc": True, "workers": 2}), (AsyncCounts, {"subproc": None})],
    ids=["in process", "workers", "async"],
)
def test_info_at_episode_end_and_its_mean_are_in_iteration_records(env: Any, settings: dict[str, Any]) -> None:
    run = train(env, log_info=KEYS, monitor_csv=True, **settings)
    rows = load_results(str(run.path))
    assert len(rows) == run.records[-1]["rollout/episodes"] > 10
    last = info_of(run.records[-1])
    assert last["info/steps_mean"] == pytest.approx(rows["l"].mean())
    assert last["info/steps"] == rows["l"].iloc[-1]
    assert last["info/array"] == 2 * last["info/steps"]
    assert last["info/is_long_mean"] == pytest.approx((rows["l"] > 3).mean())
    assert last["info/sometimes_mean"] == 1.0, "episodes without a number do not count"
    assert rows["r"].tolist() == pytest.approx((rows["l"] / 2).tolist())
    assert rows["steps"].tolist() == rows["l"].tolist()
    assert rows["sometimes"].isna().tolist() == (rows["l"] <= 3).tolist()


@pytest.mark.parametrize("settings", [{}, {"subproc": True, "workers": 2}], ids=["in process", "workers"])
@pytest.mark.parametrize("timesteps", [96, 24])
def test_key_that_no_episode_has_is_reported_once_with_those_that_exist(
    settings: dict[str, Any], timesteps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train(log_info=("keyy", "steps"), timesteps=timesteps, **settings)
    said = capsys.readouterr().err
    assert said.count("--log-info") == 1
    assert "no episode has ended with `keyy` in info so far; the numbers there are array, is_long," in said


def test_keys_that_exist_are_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    train(log_info=("steps",))
    assert "--log-info" not in capsys.readouterr().err


def test_info_without_numbers_is_not_logged_and_does_not_change_training() -> None:
    plain, logged = train(), train(log_info=("text", "nothing", "steps"), run_name="b")
    assert list(info_of(logged.records[-1])) == ["info/steps", "info/steps_mean"]
    names = [name for name in plain.records[-1] if name.startswith("train/")]
    assert [plain.records[-1][name] for name in names] == [logged.records[-1][name] for name in names]
    assert not (plain.path / "monitor.csv").exists()


def test_monitor_csv_has_the_form_of_stable_baselines3(tmp_path: Path) -> None:
    env = ["--env", "CartPole-v1", "--preset", "classic", "--n-steps", "32", "--batch-size", "32", "--n-epochs", "1"]
    flags = ["--timesteps", "320", "--eval-every", "0", "--run-name", "a", "--quiet", "--device", "cpu"]
    assert command_line(["train", *env, *flags, "--monitor-csv", "--log-info", "x,y"]) == 0
    first, columns, *rows = (tmp_path / "runs/a/monitor.csv").read_text().splitlines()
    header = json.loads(first.removeprefix("#"))
    assert header["env_id"] == "CartPole-v1"
    assert header["t_start"] > 1.7e9
    assert columns == "r,l,t,x,y"
    assert all(row.endswith(",,") for row in rows)
    table = load_results(str(tmp_path / "runs/a"))
    assert table["r"].tolist() == table["l"].tolist() == [float(row.split(",")[0]) for row in rows]
    assert (table["t"].diff().dropna() > 0).all()
    assert unidle.load("runs/a").records[-1]["wall"] >= float(rows[-1].split(",")[2])


@pytest.mark.parametrize("settings", [{}, {"overlap": "strict"}], ids=str)
def test_resumed_run_has_every_episode_once(settings: dict[str, Any]) -> None:
    recorded = {"log_info": KEYS, "monitor_csv": True, "checkpoint_every": 48, **settings}
    whole = train(run_name="whole", **recorded)
    train(after_iteration=[StopAfter(1)], **recorded)

    def crash(context: unidle.CallbackContext) -> None:
        if context.record["step"] == 72:  # past the checkpoint at 48
            raise ValueError("crash")

    with pytest.raises(ValueError, match="crash"):
        unidle.resume("runs/a", quiet=True, after_iteration=[crash])
    path = Path("runs/a/monitor.csv")
    before = path.read_text()
    path.write_text(before + "1.0,2,")  # cut short by the crash
    resumed = unidle.resume("runs/a", quiet=True)
    own, other = (load_results(str(run.path)).drop(columns=["t"]) for run in (resumed, whole))
    assert own.equals(other)
    assert info_of(resumed.records[-1]) == info_of(whole.records[-1])
    assert path.read_text().splitlines()[:5] == before.splitlines()[:5]


def test_monitor_csv_may_be_turned_on_and_off_when_a_run_is_resumed() -> None:
    run = train(timesteps=24)
    episodes = [run.records[-1]["rollout/episodes"]]
    for timesteps, is_on in ((48, True), (72, False), (96, True)):
        run = unidle.resume(run.path, timesteps=timesteps, monitor_csv=is_on, quiet=True)
        episodes.append(run.records[-1]["rollout/episodes"])
    assert len(load_results(str(run.path))) == episodes[1] - episodes[0] + episodes[3] - episodes[2]


def test_other_columns_on_resume_are_an_error() -> None:
    run = train(timesteps=24, monitor_csv=True, log_info=("steps",))
    with pytest.raises(unidle.UsageError) as error:
        unidle.resume(run.path, timesteps=48, log_info=(), quiet=True)
    expected = "runs/a/monitor.csv has other columns than r,l,t; resume with the same --log-info, or move it."
    assert str(error.value) == expected
    run = unidle.resume(run.path, timesteps=36, quiet=True)  # with the settings that it had
    assert list(load_results(str(run.path)).columns) == ["index", "r", "l", "t", "steps"]
    (run.path / "monitor.csv").unlink()
    unidle.resume(run.path, timesteps=48, log_info=(), quiet=True)
    assert list(load_results(str(run.path)).columns) == ["index", "r", "l", "t"]


def test_monitor_csv_is_not_written_through_a_link() -> None:
    run = train(timesteps=24, monitor_csv=True)
    (run.path / "monitor.csv").unlink()
    (run.path / "monitor.csv").symlink_to("/dev/full")
    run = unidle.resume(run.path, timesteps=48, quiet=True)
    assert not (run.path / "monitor.csv").is_symlink(), "the link was replaced"
    assert run.records[-1]["step"] == 48


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("unidle/CartPole-v1", {"monitor_csv": True}, "unidle/CartPole-v1 runs on the device, where episodes are only"),
        ("unidle/CartPole-v1", {"log_info": "x"}, "leave out `log_info`, or use `subproc`"),
        (cartpoles, {"log_info": "x"}, "is a vector environment, whose infos are"),
        (Counts, {"log_info": ("x", "x")}, "`log_info` is ['x', 'x']; give different names of numbers in info"),
        (Counts, {"log_info": ("r",)}, "other than r, l and t"),
        (Counts, {"log_info": ("",)}, "other than r, l and t"),
        (Counts, {"log_info": 3}, "`log_info` must be a list of names"),
    ],
)
def test_environments_and_names_that_cannot_be_logged_are_refused(
    env: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(unidle.UsageError) as error:
        train(env, **{**settings, "subproc": None})
    assert message in str(error.value)


def test_vector_environment_writes_monitor_csv() -> None:
    run = train(cartpoles, subproc=None, monitor_csv=True, timesteps=240)
    table = load_results(str(run.path))
    assert len(table) == run.records[-1]["rollout/episodes"] > 0
    assert np.array_equal(table["r"], table["l"])
