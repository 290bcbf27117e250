"""Run folders for the dashboard's tests, and a real server for them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from unidle.config import Config
from unidle.meter.attribution.idle_time import CAUSES
from unidle.report.dashboard.app import dashboard_app
from unidle.report.dashboard.folders import Runs
from unidle.report.dashboard.serve import Server


def iteration(i: int, **extra: Any) -> dict[str, Any]:
    """The record of the iteration that ends at second `i`."""
    return {
        "kind": "iteration",
        "step": 1000 * i,
        "wall": float(i),
        "rollout/return_mean": 20.0 + i,
        "rollout/steps_per_second": 1000.0,
        "time/environment": 0.5 * i,
        "time/inference": 0.2 * i,
        "time/learn": 0.3 * i,
        **extra,
    }


def evaluation(i: int, **extra: Any) -> dict[str, Any]:
    """The record of an evaluation at second `i`."""
    return {
        "kind": "evaluation",
        "step": 1000 * i,
        "wall": float(i),
        "eval/return_mean": 100.0 + i,
        "eval/return_std": 5.0,
        **extra,
    }


def segment(i: int, busy: float = 0.4, **extra: Any) -> dict[str, Any]:
    """A record of meter.jsonl for the second before `i`: half of the idle time is attributed to the environment."""
    idle = {**dict.fromkeys(CAUSES, 0.0), "environment": (1 - busy) / 2, "learn (launch)": (1 - busy) / 4}
    return {
        "step": 1000 * i,
        "seconds": float(i),
        "length": 1.0,
        "covered": 1.0,
        "gpu": {"busy": busy, "idle": idle, "unattributed": (1 - busy) / 4},
        "parts": {
            "rollout": {"share": 0.75, "busy": 0.2, "watts": 125.0},
            "learning": {"share": 0.25, "busy": 1.0, "watts": 208.0},
        },
        "host": {"environment": 0.5, "inference": 0.2, "learn": 0.3},
        "readings": {"utilisation": 0.35, "watts": 150.0, "joules": 150.0, "memory_bytes": None, "cores": 1.5},
        "spans": [["host", "environment", 0.0, 0.001], ["gpu", "inference", 0.001, 0.0015 + i * 1e-5]],
        **extra,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def make_run(runs: Path, name: str, *, seconds: int = 4, meter: bool = False, **settings: Any) -> Path:
    """A run folder with records for `seconds` seconds."""
    folder = runs / name
    folder.mkdir(parents=True)
    values = {"env": "CartPole-v1", "timesteps": 4000, "n_steps": 1000, "preset": "classic", **settings}
    config = Config().with_values(values, "test")
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", [*(iteration(i + 1) for i in range(seconds)), evaluation(seconds)])
    if meter:
        write_lines(folder / "meter.jsonl", [segment(i + 1) for i in range(seconds)])
    return folder


def make_group(runs: Path, name: str, *, seeds: int = 3, failures: dict[str, str] | None = None, **values: Any) -> Path:
    """The folder of a group: the returns of its runs rise by 1 per record, from 1, 11, 21, … on."""
    (runs / name).mkdir(parents=True)
    for seed in range(seeds):
        run = make_run(runs / name, f"seed-{seed}", seed=seed, **values)
        records = [iteration(i, **{"rollout/return_mean": 10.0 * seed + i}) for i in range(1, 5)]
        write_lines(run / "metrics.jsonl", records)
    content = {"seeds": list(range(seeds)), "failures": failures or {}}
    (runs / name / "group.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return runs / name


def make_sweep(runs: Path, name: str, trials: list[dict[str, Any]], **plan: Any) -> Path:
    """The folder of a sweep, with a run and a trial.yaml per trial."""
    folder = runs / name
    folder.mkdir(parents=True)
    tree = {"trials": len(trials), "sampler": "tpe", "job": {"run": {"env": "CartPole-v1"}}, **plan}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    for number, trial in enumerate(trials):
        run = make_run(folder, f"trial-{number}")
        if trial:
            (run / "trial.yaml").write_text(
                yaml.safe_dump({"trial": number, **trial}, sort_keys=False), encoding="utf-8"
            )
    return folder


def make_pack(packs: Path, name: str, jobs: list[dict[str, Any]]) -> Path:
    """The folder of a pack, as `unidle pack` leaves it."""
    folder = packs / name
    folder.mkdir(parents=True)
    summary = {
        "started": "2026-03-01T16:04:00+00:00",
        "folder": f"{packs.name}/{name}",
        "mps": "off: no GPU",
        "at_once": 2,
    }
    (folder / "summary.json").write_text(json.dumps({**summary, "jobs": jobs}), encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[int]:
    """Serves the runs of a folder; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        app = dashboard_app(Runs(folder), is_closing=lambda: server.should_exit, **options)
        server = Server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            deadline = time.monotonic() + 10
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
        assert not thread.is_alive()
