"""The planted-causes benchmark: output, failing jobs, interruption, and that no process is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import companion
import planted_causes
import psutil
import pytest
import torch
from diagnosed_jobs import FREE_GPU_MEMORY, diagnosed_jobs
from paths import BENCHMARKS

from unidle.cli.diagnose import _DiagnoseFlags
from unidle.cli.job import job_of
from unidle.tuning.advice.verdict import NO_FASTER_SETTINGS

WAITS_FOR_STDIN = "print('ready', flush=True); import sys; sys.stdin.read()"
IGNORES_STDIN = "print('ready', flush=True); import time; time.sleep(60)"


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_companion_program_runs_during_the_job_and_ends_after_it() -> None:
    with companion.running([sys.executable, "-c", WAITS_FOR_STDIN]) as program:
        assert program.poll() is None
    assert program.returncode == 0


def test_companion_program_that_takes_a_core_computes_until_the_job_ends() -> None:
    with companion.running(companion.core_taken()) as program:
        time.sleep(0.5)
        assert psutil.Process(program.pid).cpu_times().user > 0
    assert program.returncode == 0


def test_cause_that_is_named_beside_cpu_contention_is_a_hit() -> None:
    row = {"planted": "environment waits", "named": "CPU contention"}
    assert not planted_causes.is_hit(row)
    assert planted_causes.is_hit({**row, "also": [{"cause": "environment waits", "verdict": "It waits."}]})


def test_companion_program_is_killed_if_the_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion, "_EXIT_TIMEOUT_S", 0.2)
    with pytest.raises(KeyError), companion.running([sys.executable, "-c", IGNORES_STDIN]) as program:
        raise KeyError
    assert program.returncode == -signal.SIGKILL


def test_companion_program_that_exits_early_raises() -> None:
    with (
        pytest.raises(RuntimeError, match="did not get ready: it ended"),
        companion.running([sys.executable, "-c", ""]),
    ):
        pass


def test_companion_program_ends_if_the_benchmark_is_killed() -> None:
    code = f"import sys, time, companion\nwith companion.running([sys.executable, '-c', {WAITS_FOR_STDIN!r}]) as p:\n"
    code += "    print(p.pid, flush=True)\n    time.sleep(60)"
    benchmark = subprocess.Popen([sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    program = int(benchmark.stdout.readline())
    benchmark.kill()
    benchmark.wait()
    benchmark.stdout.close()
    wait_until_gone(program)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_diagnose_accepts_every_job(on_gpu: bool) -> None:
    jobs = diagnosed_jobs(on_gpu)
    assert [cause for cause, _ in jobs.values()].count(NO_FASTER_SETTINGS) == 1
    assert FREE_GPU_MEMORY.keys() <= diagnosed_jobs(True).keys()
    for _, flags in jobs.values():
        kwargs = ["--env-kwargs", '{"port": 1}'] if "Asking" in flags else []
        config = job_of(_DiagnoseFlags, [*flags.split(), *kwargs], "diagnose").config
        assert config.run.env.startswith("slow_envs:")


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["planted_causes.py", *argv])
    planted_causes.main()


def test_unknown_job_error_lists_the_known_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--how", "diagnose", "--jobs", "dancing")
    assert "unknown job dancing" in (output := capsys.readouterr().err)
    assert "tiny minibatches" in output


def fake_unidle(tmp_path: Path, body: str) -> str:
    script = tmp_path / "unidle"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_failed_job_is_a_miss_and_the_next_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "import json, sys\nif '--workers' in sys.argv: sys.exit('It broke.')\n"
    body += "print(json.dumps({'cause': 'environment computes', 'verdict': 'It computes.'}))"
    monkeypatch.setattr(planted_causes, "UNIDLE", fake_unidle(tmp_path, body))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    jobs = ["burning, one worker", "burning"]
    run(monkeypatch, "--how", "diagnose", "--jobs", *jobs, "--out", str(tmp_path / "out"))
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("MISS")
    assert output[0].endswith("diagnose failed: It broke.")
    assert output[1].startswith("hit")
    assert output[2] == "1 of 2 planted causes were named"
    results = json.loads((tmp_path / "out/planted_causes_diagnose.json").read_text())
    assert [(row["job"], row["named"]) for row in results["jobs"]] == [
        (jobs[0], "failed"),
        (jobs[1], results["jobs"][1]["planted"]),
    ]
    assert results["hits"] == 1
    # The other job's result stays in the file.
    run(monkeypatch, "--how", "diagnose", "--jobs", "burning", "--out", str(tmp_path / "out"))
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 planted causes were named"
    again = json.loads((tmp_path / "out/planted_causes_diagnose.json").read_text())
    assert [row["job"] for row in again["jobs"]] == jobs
    assert again["hits"] == 1


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_failed_job_on_one_core_is_reported_as_diagnose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_causes, "UNIDLE", fake_unidle(tmp_path, "raise SystemExit('It broke.')"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planted_causes.find_cause("diagnose", "healthy", 1.0)["verdict"].startswith("diagnose failed: ")


def test_invalid_job_output_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_causes, "UNIDLE", fake_unidle(tmp_path, "print('no JSON')"))
    assert planted_causes.find_cause("diagnose", "burning", 1.0)["cause"] == "failed"


def test_timed_out_job_leaves_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.pid"
    body = "import pathlib, subprocess, sys, time\n"
    body += "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    body += f"pathlib.Path({str(worker)!r}).write_text(str(worker.pid))\ntime.sleep(60)"
    monkeypatch.setattr(planted_causes, "UNIDLE", fake_unidle(tmp_path, body))
    monkeypatch.setattr(planted_causes, "TIMEOUT_S", 3.0)
    found = planted_causes.find_cause("diagnose", "burning", 1.0)
    assert found["cause"] == "failed"
    assert "timed out after 3" in found["verdict"]
    wait_until_gone(int(worker.read_text()))


def test_killed_benchmark_keeps_its_results(tmp_path: Path) -> None:
    body = "import os, sys, time\nif '--workers' in sys.argv: time.sleep(60)\n"
    body += """print('{"cause": "environment computes", "verdict": "It computes."}')"""
    code = f"import sys, planted_causes\nplanted_causes.UNIDLE = {fake_unidle(tmp_path, body)!r}\nplanted_causes.main()"
    argv = ["--how", "diagnose", "--jobs", "burning", "burning, one worker", "--out", str(tmp_path / "out")]
    benchmark = subprocess.Popen(
        [sys.executable, "-c", code, *argv], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert benchmark.stdout is not None
    assert benchmark.stdout.readline().startswith("hit")
    file = tmp_path / "out/planted_causes_diagnose_details.json"
    while not file.exists():
        assert benchmark.poll() is None
        time.sleep(0.05)
    os.killpg(benchmark.pid, signal.SIGKILL)
    benchmark.wait()
    benchmark.stdout.close()
    assert json.loads(file.with_name("planted_causes_diagnose.json").read_text())["hits"] == 1


def test_benchmark_names_a_planted_cause(tmp_path: Path) -> None:
    argv = ["--how", "diagnose", "--jobs", "tiny, off-policy", "--seconds", "1", "--out", str(tmp_path)]
    script = str(BENCHMARKS / "planted_causes.py")
    done = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("hit "), done.stdout
    details = json.loads((tmp_path / "planted_causes_diagnose_details.json").read_text())
    assert details["tiny, off-policy"]["profile"]["update_overhead"] > 0.5
