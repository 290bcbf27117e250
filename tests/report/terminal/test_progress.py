"""Progress output to a log file and to a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from unidle.report.terminal.progress import Display


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A display that writes to a text file."""

    def __init__(self) -> None:
        self.clock, self.file = Clock(), io.StringIO()
        self.display = Display(Console(file=self.file, width=40), self.clock)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def iteration(step: int, **extra: Any) -> dict[str, Any]:
    return {"kind": "iteration", "step": step, **extra}


def evaluation(step: int, mean: float, best: bool) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        "eval/return_mean": mean,
        "eval/return_std": 2.5,
        "eval/episodes": 10,
        "eval/best": best,
    }


def test_start_prints_run_facts() -> None:
    log = Log()
    log.display.on_start({"run": "runs/a", "environment": "CartPole-v1 [x]"}, 1000, 0)
    assert log.lines == ["run          runs/a", "environment  CartPole-v1 [x]"]


def test_log_gets_a_line_every_ten_seconds() -> None:
    log = Log()
    log.display.on_start({}, 10**9, 0)
    for i in range(1, 3001):  # 30 s in steps of 10 ms
        log.clock.now += 0.01
        log.display.on_iteration(iteration(i))
    assert 2 <= len(log.lines) <= 3


def test_log_of_fast_run_gets_a_line_every_five_percent() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    for step in range(1, 1001):
        log.clock.now += 0.001
        log.display.on_iteration(iteration(step))
    log.display.on_end()
    assert [line.split(" %")[0].strip() for line in log.lines] == [str(p) for p in range(5, 101, 5)]


def test_line_shows_step_return_speed_shares_and_time_left() -> None:
    log = Log()
    log.display.on_start({}, 1_000_000, 0)
    log.clock.now += 50
    times = {"time/environment": 30.0, "time/inference": 5.0, "time/learn": 15.0}
    log.display.on_iteration(iteration(100_000, wall=50.0, **{"rollout/return_mean": 21.5}, **times))
    [line] = log.lines
    assert "10 %" in line
    assert "step 100k of 1M" in line
    assert "return 21.50" in line
    assert "2k steps/s" in line
    assert "environment 60 % inference 10 % learn 30 %" in line
    assert "7 min 30 s left" in line


PHASE_SECONDS = {
    "environment": 30.0,
    "inference": 7.0,
    "learn": 21.0,
    "evaluate": 11.0,
    "checkpoint": 3.0,
    "sync": 2.2,
    "storage": 0.4,
    "other": 4.0,
}


def test_shares_of_line_and_panel_sum_to_100() -> None:
    log = Log()
    log.display.on_start({}, 1_000_000, 0)
    log.clock.now += 50
    times = {f"time/{phase}": seconds for phase, seconds in PHASE_SECONDS.items()}
    log.display.on_iteration(iteration(100_000, wall=80.0, **times))
    panel = Console(file=io.StringIO(), width=80, record=True)
    panel.print(log.display._panel())
    for shown in (log.lines[0], panel.export_text().partition("time ")[2]):
        parts = re.findall(r"(environment|inference|learn|evaluate|other) (\d+) %", shown)
        assert [part for part, _ in parts] == ["environment", "inference", "learn", "evaluate", "other"]
        assert sum(int(share) for _, share in parts) == 100


def test_gpu_use_and_elapsed_time_are_shown() -> None:
    log = Log()
    log.display.on_start({}, 1_000_000, 0)
    readings = {"memory_bytes": 12.5 * 2**30, "memory_total_bytes": 140 * 2**30}
    log.display.on_meter({"gpu": {"busy": 0.2}, "covered": 1.0, "readings": {**readings, "memory_bytes": 0}})
    log.display.on_meter({"gpu": {"busy": 0.4}, "covered": 3.0, "readings": readings})
    log.clock.now += 11
    log.display.on_iteration(iteration(100, wall=80.0))
    assert "  GPU busy 35 %   memory 12.5 of 140 GiB  1 min 20 s elapsed" in log.lines[0]
    panel = Console(file=io.StringIO(), width=80, record=True)
    panel.print(log.display._panel())
    rows = {line[:10].strip(): line[10:].strip() for line in panel.export_text().splitlines()}
    assert rows["GPU"] == "busy 35 %   memory 12.5 of 140 GiB"
    assert rows["elapsed"].startswith("1 min 20 s")


def test_gpu_is_not_shown_without_gpu() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    log.display.on_meter({"gpu": None, "covered": 1.0, "readings": {"memory_bytes": None}})
    log.clock.now += 11
    log.display.on_iteration(iteration(100, wall=80.0))
    assert "GPU" not in log.lines[0]


def test_time_left_after_resume_counts_only_new_steps() -> None:
    log = Log()
    log.display.on_start({}, 1000, 900)
    log.clock.now += 20
    log.display.on_iteration(iteration(920))  # one step a second, 80 to go
    assert "1 steps/s" in log.lines[0]
    assert "1 min 20 s left" in log.lines[0]


def test_time_left_follows_recent_speed() -> None:
    log = Log()
    log.display.on_start({}, 10_000, 0)
    log.clock.now += 600  # compiling
    for step in range(100, 1001, 100):  # then ten steps a second
        log.display.on_iteration(iteration(step))
        log.clock.now += 10
    assert "10 steps/s" in log.lines[-1]
    assert "15 min 00 s left" in log.lines[-1]


def test_evaluations_get_a_line_and_best_is_remembered() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    log.display.on_evaluation(evaluation(100, 50.0, best=True))
    log.display.on_evaluation(evaluation(200, 40.0, best=False))
    assert log.lines == [
        "evaluation 50.00 ± 2.50 at 100 over 10 episodes, the best so far",
        "evaluation 40.00 ± 2.50 at 200 over 10 episodes",
    ]
    log.clock.now += 11
    log.display.on_iteration(iteration(210))
    assert "best evaluation 50.00" in log.lines[-1]


def test_resumed_run_shows_earlier_best_evaluation() -> None:
    log = Log()
    log.display.on_start({}, 1000, 500, best=evaluation(100, 50.0, best=True))
    log.display.on_evaluation(evaluation(600, 40.0, best=False))
    log.clock.now += 11
    log.display.on_iteration(iteration(610))
    assert "best evaluation 50.00  " in log.lines[-1]
    log.display.on_evaluation({**evaluation(700, 40.0, best=True), "eval/success": 0.7})
    log.clock.now += 11
    log.display.on_iteration(iteration(710))
    assert "best evaluation 40.00, success 70 %" in log.lines[-1]


def test_end_shows_last_state_once() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    log.clock.now += 1
    log.display.on_iteration(iteration(10))
    assert log.lines == []
    log.display.on_end()
    log.display.on_end()
    [line] = log.lines
    assert "step 10 of 1k" in line
    assert "left" not in line


def test_message_is_printed_unchanged() -> None:
    log = Log()
    log.display.on_message("saved to [bold]runs/a[/bold] " + "x" * 80)
    assert log.lines == ["saved to [bold]runs/a[/bold] " + "x" * 80]


def test_faults_are_counted_if_there_are_any() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    log.clock.now += 11
    log.display.on_iteration(iteration(10))
    log.clock.now += 11
    log.display.on_iteration(iteration(20, **{"faults/exception": 3, "faults/killed": 1}))
    assert "faults" not in log.lines[0]
    assert "  faults 4" in log.lines[1]


def test_suppressed_messages_are_counted_at_end() -> None:
    log = Log()
    for episode in range(5):
        log.display.on_message(f"Environment 0 failed in episode {episode}: ValueError\nTraceback")
    log.display.on_end()
    assert log.lines == [
        "Environment 0 failed in episode 0: ValueError",
        "  Traceback",
        "4 similar messages not shown: Environment … failed in episode …: ValueError",
    ]


def test_forced_colours_do_not_turn_log_into_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = Log()
    assert log.display._console.is_terminal
    log.display.on_start({}, 1000, 0)
    log.display.on_iteration(iteration(100))
    log.display.on_end()
    assert len(log.lines) == 1
    assert not re.search(r"\x1b\[(\d*[A-K]|\?25)", log.file.getvalue())  # no cursor movement


def test_iteration_between_redraws_is_cheap() -> None:
    log = Log()
    log.display.on_start({}, 10**9, 0)
    record = iteration(1)
    start = time.perf_counter()
    for _ in range(10_000):
        log.display.on_iteration(record)
    assert (time.perf_counter() - start) / 10_000 < 20e-6  # 1 % of an iteration of 2 ms
    assert log.lines == []


_ON_A_TERMINAL = """
import time
from unidle.report.terminal.progress import Display
times = {"time/environment": 6.0, "time/inference": 1.0, "time/learn": 3.0}
with Display() as display:
    display.on_start({"run": "runs/a"}, 1000, 0)
    for step in range(10, 510, 10):
        time.sleep(0.02)
        faults = {"faults/exception": 2} if step > 250 else {}
        display.on_iteration({"step": step, "wall": 10.0, "rollout/return_mean": 21.5, **times, **faults})
    display.on_evaluation({"step": 500, "eval/return_mean": 50.0, "eval/best": True})
    for number in range(3):
        display.on_message(f"a message of {number}\\nwith details\\n")
    print("for stdout")
    END
"""


def run_on_a_terminal(end: str) -> tuple[str, str, int]:
    """The output of a program with a display on stderr (a terminal) and stdout (a pipe), and its exit status."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL.replace("END", end)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # on Linux: the other end was closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read().decode()
    return shown.decode(), out, process.wait(60)


def test_terminal_panel_redraws_few_times_and_stdout_stays_clean() -> None:
    shown, out, code = run_on_a_terminal("pass")
    assert code == 0
    assert out == "for stdout\n"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for text in ("50 %", "500 of 1k", "21.50", "best 50.00 at 500", "environment 60 %", "2 × exception or NaN"):
        assert text in plain
    assert plain.count("a message of 0") == 1
    assert plain.count("with details") == 1
    assert "2 similar messages not shown: a message of …" in plain
    assert "steps/s" in plain
    redraws = plain.count("last 100 episodes")
    assert 3 <= redraws <= 15  # of 50 iterations in a second or more


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('boom')", 1), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_cursor_is_visible_after_exception_or_kill(end: str, code: int) -> None:
    shown, _, returned = run_on_a_terminal(end)
    assert returned == code
    hidden, visible = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
    assert visible > hidden
    assert ("boom" in shown) == (code == 1)


def test_evaluation_shows_success_overall_and_by_task() -> None:
    log = Log()
    log.display.on_start({}, 1000, 0)
    tasks = {"eval/success": 0.7, "eval/success/reach-v3": 1.0, "eval/success/push-v3": 0.4}
    log.display.on_evaluation(evaluation(100, 50.0, best=False) | tasks)
    assert log.lines[-1] == (
        "evaluation 50.00 ± 2.50, success 70 % at 100 over 10 episodes (reach-v3 100 %, push-v3 40 %)"
    )
