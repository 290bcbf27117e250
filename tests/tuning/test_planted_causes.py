"""The benchmark of planted causes: what it says, what it leaves when it is cut, and that nothing of it is left over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import beside
import planted_causes
import psutil
import pytest
import torch
from diagnosed_jobs import ROOM_ON_GPU, diagnosed_jobs
from paths import BENCHMARKS

from unidle.cli.diagnose import _DiagnoseFlags
from unidle.cli.job import job_of
from unidle.tuning.advice.verdict import NOTHING_TO_GAIN

PATIENT = "print('ready', flush=True); import sys; sys.stdin.read()"
STUBBORN = "print('ready', flush=True); import time; time.sleep(60)"


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_program_beside_a_job_is_there_during_it_and_gone_after_it() -> None:
    with beside.running([sys.executable, "-c", PATIENT]) as program:
        assert program.poll() is None
    assert program.returncode == 0


def test_a_program_beside_a_job_that_fails_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_PATIENCE_S", 0.2)
    with pytest.raises(KeyError), beside.running([sys.executable, "-c", STUBBORN]) as program:
        raise KeyError
    assert program.returncode == -signal.SIGKILL


def test_a_program_that_is_never_ready_says_so() -> None:
    with pytest.raises(RuntimeError, match="did not get ready: it ended"), beside.running([sys.executable, "-c", ""]):
        pass


def test_a_program_beside_a_job_ends_with_a_benchmark_that_is_killed() -> None:
    code = f"import sys, time, beside\nwith beside.running([sys.executable, '-c', {PATIENT!r}]) as p:\n"
    code += "    print(p.pid, flush=True)\n    time.sleep(60)"
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    program = int(killed.stdout.readline())
    killed.kill()
    killed.wait()
    killed.stdout.close()
    wait_until_gone(program)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_job_is_one_that_diagnose_takes(on_gpu: bool) -> None:
    jobs = diagnosed_jobs(on_gpu)
    assert [cause for cause, _ in jobs.values()].count(NOTHING_TO_GAIN) == 1
    assert ROOM_ON_GPU.keys() <= diagnosed_jobs(True).keys()
    for _, words in jobs.values():
        kwargs = ["--env-kwargs", '{"port": 1}'] if "Asking" in words else []
        config = job_of(_DiagnoseFlags, [*words.split(), *kwargs], "diagnose").config
        assert config.run.env.startswith("slow_envs:")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["planted_causes.py", *words])
    planted_causes.main()


def test_a_job_that_nobody_planted_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--how", "diagnose", "--jobs", "dancing")
    assert "unknown job dancing" in (said := capsys.readouterr().err)
    assert "tiny minibatches" in said


def unidle_that(tmp_path: Path, does: str) -> str:
    script = tmp_path / "unidle"
    script.write_text(f"#!{sys.executable}\n{does}\n")
    script.chmod(0o755)
    return str(script)


def test_a_job_that_fails_is_a_miss_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    does = "import json, sys\nif '--workers' in sys.argv: sys.exit('It broke.')\n"
    does += "print(json.dumps({'cause': 'environment computes', 'verdict': 'It computes.'}))"
    monkeypatch.setattr(planted_causes, "UNIDLE", unidle_that(tmp_path, does))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    jobs = ["burning, one worker", "burning"]
    run(monkeypatch, "--how", "diagnose", "--jobs", *jobs, "--out", str(tmp_path / "out"))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("MISS")
    assert said[0].endswith("diagnose failed: It broke.")
    assert said[1].startswith("hit")
    assert said[2] == "1 of 2 planted causes were named"
    kept = json.loads((tmp_path / "out/planted_causes_diagnose.json").read_text())
    assert [(row["job"], row["named"]) for row in kept["jobs"]] == [
        (jobs[0], "failed"),
        (jobs[1], kept["jobs"][1]["planted"]),
    ]
    assert kept["hits"] == 1
    run(monkeypatch, "--how", "diagnose", "--jobs", "burning", "--out", str(tmp_path / "out"))  # the other is kept
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 planted causes were named"
    again = json.loads((tmp_path / "out/planted_causes_diagnose.json").read_text())
    assert [row["job"] for row in again["jobs"]] == jobs
    assert again["hits"] == 1


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_job_that_fails_on_one_core_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_causes, "UNIDLE", unidle_that(tmp_path, "raise SystemExit('It broke.')"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planted_causes.tried("diagnose", "healthy", 1.0)["verdict"].startswith("diagnose failed: ")


def test_a_job_that_prints_something_else_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_causes, "UNIDLE", unidle_that(tmp_path, "print('no JSON')"))
    assert planted_causes.tried("diagnose", "burning", 1.0)["cause"] == "failed"


def test_of_a_job_that_takes_too_long_nothing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.pid"
    does = "import pathlib, subprocess, sys, time\n"
    does += "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    does += f"pathlib.Path({str(worker)!r}).write_text(str(worker.pid))\ntime.sleep(60)"
    monkeypatch.setattr(planted_causes, "UNIDLE", unidle_that(tmp_path, does))
    monkeypatch.setattr(planted_causes, "PATIENCE_S", 3.0)
    found = planted_causes.tried("diagnose", "burning", 1.0)
    assert found["cause"] == "failed"
    assert "timed out after 3" in found["verdict"]
    wait_until_gone(int(worker.read_text()))


def test_a_run_that_is_cut_leaves_what_it_has(tmp_path: Path) -> None:
    does = "import os, sys, time\nif '--workers' in sys.argv: time.sleep(60)\n"
    does += """print('{"cause": "environment computes", "verdict": "It computes."}')"""
    code = f"import sys, planted_causes\nplanted_causes.UNIDLE = {unidle_that(tmp_path, does)!r}\nplanted_causes.main()"
    words = ["--how", "diagnose", "--jobs", "burning", "burning, one worker", "--out", str(tmp_path / "out")]
    cut = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert cut.stdout is not None
    assert cut.stdout.readline().startswith("hit")
    file = tmp_path / "out/planted_causes_diagnose_details.json"
    while not file.exists():
        assert cut.poll() is None
        time.sleep(0.05)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    cut.stdout.close()
    assert json.loads(file.with_name("planted_causes_diagnose.json").read_text())["hits"] == 1


def test_a_planted_cause_is_named(tmp_path: Path) -> None:
    words = ["--how", "diagnose", "--jobs", "tiny, off-policy", "--seconds", "1", "--out", str(tmp_path)]
    script = str(BENCHMARKS / "planted_causes.py")
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("hit "), done.stdout
    details = json.loads((tmp_path / "planted_causes_diagnose_details.json").read_text())
    assert details["tiny, off-policy"]["profile"]["update_overhead"] > 0.5
