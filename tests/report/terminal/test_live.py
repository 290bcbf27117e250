"""Progress in a Jupyter notebook: one output of the cell, updated in place."""

from __future__ import annotations

import builtins
import io
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from unidle.groups.display import GroupDisplay
from unidle.report.terminal.live import NotebookConsole, live_view, progress_console
from unidle.report.terminal.progress import Display
from unidle.sweeps.display import SweepDisplay


class Output:
    """IPython's handle of one output."""

    def __init__(self, bundle: dict[str, str]) -> None:
        self.bundles = [bundle]

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.bundles.append(bundle)

    @property
    def text(self) -> str:
        return self.bundles[-1]["text/plain"]

    @property
    def html(self) -> str:
        return self.bundles[-1]["text/html"]


class ZMQInteractiveShell:
    """Rich recognises the shell of a notebook by this name."""


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of a notebook's cell."""
    made: list[Output] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw
        assert display_id
        made.append(Output(bundle))
        return made[-1]

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    return made


def iteration(step: int, **extra: Any) -> dict[str, Any]:
    return {"kind": "iteration", "step": step, "rollout/return_mean": 21.5, **extra}


def test_run_has_one_output_with_facts_messages_and_panel(
    outputs: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    with Display() as display:
        display.on_start({"run": "runs/a", "environment": "CartPole-v1 <x>"}, 1000, 0)
        display.on_iteration(iteration(500))
        display.on_evaluation({"step": 500, "eval/return_mean": 50.0, "eval/best": True})
        display.on_message("worker 1 was restarted")
    [output] = outputs
    lines = [line.rstrip() for line in output.text.splitlines()]
    assert lines[:3] == ["run          runs/a", "environment  CartPole-v1 <x>", "worker 1 was restarted"]
    assert lines.count("evaluation  50.00 at 500   best 50.00 at 500") == 1  # the latest panel replaces the others
    assert "50 %" in output.text
    assert "CartPole-v1 &lt;x&gt;" in output.html
    assert "<span style=" in output.html
    assert capsys.readouterr() == ("", "")


def test_panel_is_redrawn_few_times(outputs: list[Output]) -> None:
    now = 0.0
    with Display(clock=lambda: now) as display:
        display.on_start({"run": "runs/a"}, 10_000, 0)
        for step in range(1, 1001):  # 10 s in steps of 10 ms
            now += 0.01
            display.on_iteration(iteration(step))
    assert 20 <= len(outputs[0].bundles) <= 50


def test_group_and_sweep_have_one_output_each(outputs: list[Output]) -> None:
    with GroupDisplay(["seed-1", "seed-2"]) as group:
        group.of("seed-1").on_start({"run": "runs/a/seed-1"}, 1000, 0, None)
        group.of("seed-1").on_iteration(iteration(500))
    with SweepDisplay(8) as sweep:
        sweep.show_facts({"sweep": "runs/b"})
        sweep.trial_started(0, {"gamma": 0.9}, 1)
    first, second = outputs
    assert "2 in runs/a: seed-1, seed-2" in first.text
    assert "seed-1    500  50 %   21.50" in first.text
    assert second.text.startswith("sweep  runs/b")
    assert "gamma 0.9" in second.text


def test_quiet_group_shows_nothing(outputs: list[Output]) -> None:
    with GroupDisplay(["seed-1"], quiet=True) as group:
        group.of("seed-1").on_start({"run": "runs/a/seed-1"}, 1000, 0, None)
    assert outputs == []


def test_old_lines_are_dropped(outputs: list[Output]) -> None:
    console = NotebookConsole()
    for line in range(1000):
        console.print(f"line {line}")
    assert outputs[0].text.splitlines() == [f"line {line}" for line in range(800, 1000)]


def test_ipython_on_a_terminal_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("TerminalInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert not isinstance(progress_console(), NotebookConsole)


def test_nothing_is_redrawn_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert live_view(Console(file=io.StringIO(), force_terminal=True, force_interactive=True)) is None
