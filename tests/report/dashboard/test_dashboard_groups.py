"""Groups, sweeps, packs and comparisons on the dashboard: rows, views, and confinement to the folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_runs import evaluation, iteration, make_group, make_pack, make_run, make_sweep, serving, write_lines
from dashboard_server import events_of, get, rows_of
from hypothesis import given
from hypothesis import strategies as st

from unidle.config import Config
from unidle.report.dashboard.files import has_regular, sampled_records
from unidle.report.dashboard.folders import Entry, Runs
from unidle.report.dashboard.packs import PackReader
from unidle.report.dashboard.rows import Rows
from unidle.report.dashboard.runs import as_json
from unidle.report.dashboard.several import SeveralReader
from unidle.report.dashboard.sweeps import SweepReader
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.plan import Plan
from unidle.sweeps.space import read_space

FINISHED = {"state": "finished", "settings": {"gamma": 0.9}}


def entry_of(runs: Path, path: str) -> Entry:
    entry = Runs(runs).find(path)
    assert entry is not None
    return entry


def view_of(reader: Any) -> Any:
    assert reader.refresh()
    return json.loads(as_json(reader.view()))


def group_view(runs: Path, path: str) -> Any:
    group = entry_of(runs, path)
    return view_of(SeveralReader(group.members, group))


def compared(runs: Path, *paths: str) -> Any:
    return view_of(SeveralReader(lambda: [entry_of(runs, path) for path in paths]))


# -- groups ----------------------------------------------------------------------------------------------------------


def test_group_is_one_row_with_the_mean_of_its_runs(tmp_path: Path) -> None:
    make_group(tmp_path, "g", seeds=5)
    (row,) = rows_of(tmp_path)
    shown = {
        key: row[key] for key in ("kind", "path", "note", "env", "seed", "state", "step", "total", "rate", "return")
    }
    assert shown == {
        "kind": "group",
        "path": "g",
        "note": "5 runs",
        "env": "CartPole-v1",
        "seed": "0–4",
        "state": "done",
        "step": "20,000",
        "total": "20k",
        "rate": "5k",
        "return": "24.00",  # of 4, 14, 24, 34 and 44 without the lowest and the highest
    }
    assert row["spark"] == [[1000, 2000, 3000, 4000], [21, 22, 23, 24]]


def test_group_row_counts_states_and_follows_its_runs(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", failures={"seed-2": "out of memory"})
    rows = Rows()
    (row,) = rows_of(tmp_path, rows)
    assert (row["state"], row["note"]) == ("failed", "3 runs: 2 done, 1 failed")
    with (group / "seed-1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (row,) = rows_of(tmp_path, rows)
        assert (row["state"], row["note"]) == ("training", "3 runs: 1 done, 1 training, 1 failed")
    write_lines(group / "seed-0" / "metrics.jsonl", [iteration(9, **{"rollout/return_mean": 96.0})])
    (row,) = rows_of(tmp_path, rows)
    assert row["return"] == "44.67"


def test_group_view_has_all_runs_and_their_interquartile_mean(tmp_path: Path) -> None:
    make_group(tmp_path, "g", seeds=5)
    view = group_view(tmp_path, "g")
    assert [line["name"] for line in view["lines"]] == ["interquartile mean", *(f"seed-{i}" for i in range(5))]
    assert view["lines"][0]["steps"]["x"] == [1000, 2000, 3000, 4000]
    assert view["lines"][0]["steps"]["y"] == [21, 22, 23, 24]
    assert view["lines"][0]["seconds"]["x"] == [1, 2, 3, 4]
    assert all(low <= mean for low, mean in zip(view["lines"][0]["steps"]["low"], view["lines"][0]["steps"]["y"]))
    assert view["lines"][5]["steps"]["y"] == [41, 42, 43, 44]
    assert view["measure"] == "training, last 100 episodes"
    assert [row["path"] for row in view["rows"]] == [f"g/seed-{i}" for i in range(5)]
    assert (view["settings"]["names"], view["settings"]["n_known"]) == ([], 5)
    figures = {name: value for name, value, _ in view["figures"]}
    assert (figures["Training return, interquartile mean"], figures["Best"], figures["Worst"]) == (
        "24.00",
        "44.00",
        "4.00",
    )


def test_group_view_shows_evaluations_once_there_is_one(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", seeds=2)
    write_lines(group / "seed-0" / "metrics.jsonl", [iteration(1), evaluation(1), evaluation(2)])
    view = group_view(tmp_path, "g")
    assert view["measure"] == "evaluation"
    assert view["lines"][1]["steps"] == {"x": [1000, 2000], "y": [101, 102]}
    assert view["lines"][2]["steps"]["y"] == []


def test_group_view_follows_new_records_and_new_runs(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", seeds=2)
    entry = entry_of(tmp_path, "g")
    reader = SeveralReader(entry.members, entry)
    assert reader.refresh()
    assert not reader.refresh()
    with (group / "seed-1" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(iteration(5)) + "\n")
    assert reader.refresh()
    assert reader.view()["lines"][2]["steps"]["x"][-1] == 5000
    make_run(group, "seed-7")
    assert reader.refresh()
    assert [line["name"] for line in reader.view()["lines"]][1:] == ["seed-0", "seed-1", "seed-7"]


def test_group_without_records_or_runs_has_a_page(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", seeds=1)
    (group / "seed-0" / "metrics.jsonl").unlink()
    assert group_view(tmp_path, "g")["lines"][0]["steps"] == {"x": [], "y": []}
    make_group(tmp_path, "empty", seeds=0)
    entry = entry_of(tmp_path, "empty")
    reader = SeveralReader(entry.members, entry)
    reader.refresh()
    assert (reader.view()["lines"], reader.view()["rows"]) == ([], [])
    assert {row["name"]: row["note"] for row in rows_of(tmp_path)} == {"g": "1 run", "empty": "0 runs"}


def test_folder_of_one_group_shows_that_group(tmp_path: Path) -> None:
    make_group(tmp_path, "g")
    make_run(tmp_path, "x")
    with serving(tmp_path / "g") as port:
        for path, status in {"/run/g": 200, "/run/g/seed-0": 200, "/run/x": 404, "/run/seed-0": 404}.items():
            assert get(port, path).status == status, path


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_sweep_is_one_row_and_a_page_of_trials(tmp_path: Path) -> None:
    config = Config().with_values({"env": "CartPole-v1", "timesteps": 4000}, "test")
    space = read_space({"gamma": {"low": 0.9, "high": 0.99}}, config)
    sweep = SweepFolder(tmp_path / "s", Plan(trials=2), space, config)
    sweep.create()
    for number, value in enumerate((20.0, 30.0)):
        record = {"trial": number, "state": "finished", "value": value, "settings": {"gamma": 0.9 + number / 100}}
        (make_run(tmp_path / "s", f"trial-{number}") / "trial.yaml").write_text(yaml.safe_dump(record))
    (row,) = rows_of(tmp_path)
    assert (row["kind"], row["state"], row["note"]) == ("sweep", "training", "sweep, 2 trials")
    sweep.unlock()
    (row,) = rows_of(tmp_path)
    assert (row["state"], row["env"], row["return"]) == ("done", "CartPole-v1", "30.00")
    assert (row["step"], row["total"], row["spark"]) == ("2", "2", [[0, 1], [20, 30]])
    view = view_of(SweepReader(entry_of(tmp_path, "s")))
    assert [trial["values"] for trial in view["trials"]] == [[20.0], [30.0]]
    assert [trial["settings"] for trial in view["trials"]] == [["0.9"], ["0.91"]]
    assert (len(view["objectives"]), view["settings"]) == (1, ["gamma"])


def test_sweep_of_two_objectives_has_a_front(tmp_path: Path) -> None:
    trials = [
        {"return": 10.0, "time-to-target": 60.0, **FINISHED},
        {"return": 20.0, "time-to-target": 90.0, **FINISHED},
        {"return": 5.0, "time-to-target": 1e9 + 7, **FINISHED},
        {"return": 7.0, "state": "pruned", "settings": {}},
        {"state": "failed", "error": "NaN", "settings": {}},
        {},
    ]
    sweep = make_sweep(tmp_path, "s", trials)
    (sweep / "pareto").mkdir()
    (sweep / "pareto" / "trial-1.yaml").touch()
    view = view_of(SweepReader(entry_of(tmp_path, "s")))
    assert view["objectives"] == ["return", "time-to-target"]
    assert [trial["values"][1] for trial in view["trials"]] == [60.0, 90.0, None, None, None, None]
    assert [trial["texts"][1] for trial in view["trials"]][:3] == ["1 min 00 s", "1 min 30 s", "–"]
    assert [trial["is_best"] for trial in view["trials"]] == [False, True, False, False, False, False]
    assert [trial["state"] for trial in view["trials"]][3:] == ["pruned", "failed", "stopped"]
    assert view["trials"][4]["error"] == "NaN"
    assert rows_of(tmp_path)[0]["note"] == "sweep, 6 trials: 3 finished, 1 pruned, 1 failed, 1 stopped"


def test_trial_of_several_seeds_is_a_group_with_runs(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "s", [FINISHED])
    make_group(sweep, "trial-1")
    view = view_of(SweepReader(entry_of(tmp_path, "s")))
    assert [(trial["path"], trial["kind"]) for trial in view["trials"]] == [
        ("s/trial-0", "run"),
        ("s/trial-1", "group"),
    ]
    with serving(tmp_path) as port:
        for path in ("s", "s/trial-0", "s/trial-1", "s/trial-1/seed-2"):
            assert get(port, f"/run/{path}").status == 200, path
        with events_of(port, "/run/s/trial-1/seed-2/events") as events:
            assert events.next()["facts"][-1] == ["seed", "2"]


def test_new_trial_is_noticed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "s", [FINISHED])
    reader = SweepReader(entry_of(tmp_path, "s"))
    assert reader.refresh()
    assert not reader.refresh()
    make_run(sweep, "trial-1")
    assert reader.refresh()
    assert len(reader.view()["trials"]) == 2


# -- packs -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As if a process were running the pack."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def job(name: str, state: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "command": ["python", "a b.py"], "cores": [0, 1], "seconds": 61.0, **values}


def test_pack_shows_its_jobs_and_links_their_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "x")
    make_run(tmp_path, "elsewhere")
    jobs = [
        job("a", "finished", run="runs/x", exit_code=0, steps_per_second=1234.0),
        job("b", "failed", run="elsewhere", exit_code=3),
        job("c", "running", run=None),
    ]
    folder = make_pack(tmp_path / "packs", "p", jobs)
    packs = Runs(tmp_path / "packs")
    with (
        locked(folder),
        serving(tmp_path / "runs", packs=packs) as port,
        events_of(port, "/events") as events,
    ):
        run, pack = events.next()
        assert (run["path"], pack["kind"], pack["path"]) == ("x", "pack", "p")
        assert (pack["state"], pack["note"]) == ("training", "pack, 3 jobs: 1 finished, 1 failed, 1 running")
        assert get(port, "/pack/p").status == 200
        assert get(port, "/pack/x").status == 200  # all of the folder of runs is there too
        assert get(port, "/run/p").status == 404
        with events_of(port, "/pack/p/events") as page:
            view = page.next()
    assert [shown["run"] for shown in view["jobs"]] == ["x", None, None]
    assert view["jobs"][0]["command"] == "python 'a b.py'"
    assert [view["jobs"][0][key] for key in ("exit", "time", "rate", "cores")] == ["0", "1 min 01 s", "1.23k", "2"]


def test_killed_pack_is_stopped(tmp_path: Path) -> None:
    folder = make_pack(tmp_path, "p", [job("a", "finished"), job("b", "running"), job("c", "waiting")])
    rows, reader = Rows(), PackReader(entry_of(tmp_path, "p"), Runs(tmp_path).at)
    with locked(folder):
        assert [row["state"] for row in rows_of(tmp_path, rows)] == ["training"]
        assert reader.refresh()
        assert [shown["state"] for shown in reader.view()["jobs"]] == ["finished", "running", "waiting"]
        assert not reader.refresh()
    (row,) = rows_of(tmp_path, rows)
    assert (row["state"], row["note"]) == ("stopped", "pack, 3 jobs: 1 finished, 1 stopped, 1 not started")
    assert reader.refresh()
    assert [shown["state"] for shown in reader.view()["jobs"]] == ["finished", "stopped", "not started"]


def test_finished_pack_is_done_and_a_failed_one_failed(tmp_path: Path) -> None:
    make_pack(tmp_path, "a", [job("a", "finished")])
    make_pack(tmp_path, "b", [job("a", "finished"), job("b", "failed")])
    make_pack(tmp_path, "c", [job("a", "finished"), job("b", "stopped")])
    assert [row["state"] for row in rows_of(tmp_path)] == ["done", "failed", "stopped"]


# -- comparisons -----------------------------------------------------------------------------------------------------


def test_runs_and_groups_are_compared_on_one_plot(tmp_path: Path) -> None:
    make_run(tmp_path, "x", learning_rate=0.5)
    (tmp_path / "x" / "metrics.jsonl").write_text(json.dumps(iteration(1)) + "\n")
    make_group(tmp_path, "g", learning_rate=0.25)
    view = compared(tmp_path, "x", "g", "g/seed-1")
    assert [(line["name"], line["is_mean"]) for line in view["lines"]] == [
        ("x", False),
        ("g", True),
        ("g/seed-1", False),
    ]
    assert view["lines"][1]["steps"]["y"] == view["lines"][2]["steps"]["y"] == [11, 12, 13, 14]
    assert view["lines"][0]["seconds"] == {"x": [1], "y": [21]}
    assert view["settings"]["names"] == ["learning_rate"]
    assert view["settings"]["rows"] == [["x", "0.5"], ["g", "0.25"], ["g/seed-1", "0.25"]]


def test_evaluations_are_compared_only_if_all_runs_have_one(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    make_run(tmp_path, "y")
    assert compared(tmp_path, "x", "y")["measure"] == "evaluation"
    write_lines(tmp_path / "y" / "metrics.jsonl", [iteration(1)])
    view = compared(tmp_path, "x", "y")
    assert view["measure"] == "training, last 100 episodes"
    assert all(line["steps"]["y"] for line in view["lines"])


def test_only_known_runs_and_groups_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    make_group(tmp_path, "g")
    make_sweep(tmp_path, "s", [FINISHED])
    statuses = {"": 400, "run=x": 400, "run=x&run=x": 400, "run=x&run=g": 200, "run=x&run=s": 404, "run=x&run=..": 404}
    statuses["run=x&run=g%2fseed-1"] = 200
    statuses["&".join(f"run=g/seed-{i}" for i in range(25))] = 400
    with serving(tmp_path) as port:
        for query, status in statuses.items():
            assert get(port, f"/compare?{query}").status == status, query
            if status != 200:
                assert get(port, f"/compare/events?{query}").status == status, query
        with events_of(port, "/compare/events?run=x&run=g") as events:
            assert len(events.next()["lines"]) == 2


# -- nothing outside the folder, and nothing that hides the rest ------------------------------------------------------


def test_members_behind_symlinks_are_not_shown(tmp_path: Path) -> None:
    secret = make_group(tmp_path / "outside", "secret", env="Secret-v0")
    runs = tmp_path / "runs"
    group = make_group(runs, "g")
    (group / "seed-7").symlink_to(secret / "seed-0")
    (runs / "link").symlink_to(secret)
    make_run(group, "seed-8").joinpath("metrics.jsonl").unlink()
    (group / "seed-8" / "metrics.jsonl").symlink_to(secret / "seed-0" / "metrics.jsonl")
    with serving(runs) as port:
        assert get(port, "/run/g/seed-0").status == 200
        paths = ["g/seed-7", "link", "link/seed-0", "g/../../outside/secret", "g%2f..%2fg", "g/seed-0/checkpoints"]
        paths += ["g/.", "g/group.yaml", "g/", "g//seed-0", "/g", "g/seed-0/../seed-0", "g/%00", "g/seed-%D9%A3"]
        for path in paths:
            for end in ("", "/events", "/spans?at=0"):
                response = get(port, f"/run/{path}{end}")
                assert response.status == 404, path + end
                assert "Secret" not in response.text
    assert [row["path"] for row in group_view(runs, "g")["rows"]] == ["g/seed-0", "g/seed-1", "g/seed-2", "g/seed-8"]
    assert group_view(runs, "g")["lines"][-1]["steps"]["x"] == []


def test_group_replaced_by_a_symlink_is_not_followed(tmp_path: Path) -> None:
    secret = make_group(tmp_path / "outside", "secret")
    group = make_group(tmp_path / "runs", "g")
    run = entry_of(tmp_path / "runs", "g/seed-0").folder  # found, and then replaced
    assert has_regular(run, "config.yaml")
    group.rename(tmp_path / "moved")
    group.symlink_to(secret)
    assert (run / "config.yaml").is_file()
    assert not has_regular(run, "config.yaml")


@pytest.mark.parametrize("content", ["[" * 5000, "a: 1\n" * 300_000, "\0", "- 1", "{}", '{"jobs": 5}', ""])
def test_damaged_files_of_groups_sweeps_and_packs_do_not_hide_others(content: str, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    (make_group(tmp_path, "g") / "group.yaml").write_text(content)
    sweep = make_sweep(tmp_path, "s", [FINISHED])
    (sweep / "sweep.yaml").write_text(content)
    (sweep / "trial-0" / "trial.yaml").write_text(content)
    (make_pack(tmp_path, "p", []) / "summary.json").write_text(content)
    assert {row["name"] for row in json.loads(as_json(rows_of(tmp_path)))} == {"a", "g", "s", "p"}
    group_view(tmp_path, "g")
    for reader in (SweepReader(entry_of(tmp_path, "s")), PackReader(entry_of(tmp_path, "p"), Runs(tmp_path).at)):
        reader.refresh()
        as_json(reader.view())


@pytest.mark.parametrize("value", [{}, [], "x" * 99, 10**400, float("nan"), True, None, "\ud800"])
def test_hostile_values_in_a_trial_are_tolerated(value: Any, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    trial = dict.fromkeys(("state", "error", "settings", "return", "objective"), value)
    sweep = make_sweep(tmp_path, "s", [FINISHED])
    (sweep / "trial-0" / "trial.yaml").write_text(yaml.safe_dump(trial))
    assert len(rows_of(tmp_path)) == 2
    reader = SweepReader(entry_of(tmp_path, "s"))
    reader.refresh()
    as_json(reader.view())


def test_numbers_that_overflow_do_not_hide_others(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", seeds=3)
    largest = {"rollout/return_mean": 1.7976931348623157e308, "wall": 1e-320}
    for seed in range(3):
        records = [iteration(i, **largest) for i in (1, 2)]
        write_lines(group / f"seed-{seed}" / "metrics.jsonl", records)
    sweep = make_sweep(tmp_path, "s", [{"state": "finished", "return": 1.0, "settings": {"a": float("inf")}}])
    make_run(tmp_path, "x")
    assert {row["name"] for row in json.loads(as_json(rows_of(tmp_path)))} == {"g", "s", "x"}
    group_view(tmp_path, "g")
    assert view_of(SweepReader(entry_of(tmp_path, sweep.name)))["trials"][0]["numbers"] == [None]


def test_missing_page_is_a_page_with_a_link(tmp_path: Path) -> None:
    with serving(tmp_path) as port:
        for path, sentence in {
            "/run/x": "There is no such run in this folder.",
            "/nothing": "There is no such page.",
        }.items():
            response = get(port, path)
            assert (response.status, response.headers["content-type"]) == (404, "text/html; charset=utf-8")
            assert sentence in response.text
            assert '<a href="/">' in response.text


@given(st.lists(st.text("ab", max_size=300), min_size=1, max_size=60), st.integers(1, 40))
def test_sampled_records_are_in_order_with_the_first_and_the_last(texts: list[str], count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.path.realpath(folder))
        write_lines(path / "x.jsonl", [{"number": i, "text": text} for i, text in enumerate(texts)])
        numbers = [record["number"] for record in sampled_records(path, "x.jsonl", count)]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, len(texts) - 1)
    assert len(numbers) <= count + 1
    assert len(set(numbers)) >= len(numbers) - 1  # only the last one may be there twice
