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

from unidle.config import Config
from unidle.meter.attribution.idle_time import CAUSES
from unidle.report.dashboard.app import dashboard_app
from unidle.report.dashboard.files import Runs
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
