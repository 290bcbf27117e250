"""examples/quickstart.ipynb: its cells run in order, and show what they promise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from dashboard_runs import segment, write_lines
from paths import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def shortened(text: str) -> str:
    """A tenth of the steps."""
    return re.sub(r"timesteps=([\d_]+)", lambda found: f"timesteps={int(found[1].replace('_', '')) // 10}", text)


@pytest.fixture
def run_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs cells in an interpreter's namespace."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)

    def run(cells: list[str], known: dict[str, Any] | None = None) -> dict[str, Any]:
        names = {"__name__": "__main__"} if known is None else known
        for index, text in enumerate(cells):
            exec(compile(shortened(text), f"cell {index}", "exec"), names)
        return names

    return run


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_cells_train_plot_evaluate_and_predict(
    run_cells: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib.pyplot as plt

    plots = []
    plt.close("all")  # of other tests in this process: the notebook draws on the current figure
    monkeypatch.setattr(plt, "show", lambda: (plots.append(plt.gcf()), plt.close()))
    names = run_cells(CODE)
    run, (curve, times) = names["run"], plots
    training, evaluations = curve.axes[0].lines
    assert [record["step"] for record in names["evaluations"]] == list(evaluations.get_xdata())
    assert list(training.get_xdata())[-1] == run.summary()["step"] == 4096
    assert times.axes[0].get_yticklabels()[0].get_text() == "environment"
    printed = capsys.readouterr().out
    assert f"mean return {names['result'].mean_return:.1f}" in printed
    assert names["result"].episodes == 20
    assert f"balanced for {names['steps']} steps" in printed
    assert "This run used no GPU." in printed
    assert printed.splitlines()[-1] == str(run.report)
    assert run.report.is_file()

    write_lines(run.path / "meter.jsonl", [segment(1, busy=0.4), segment(2, busy=0.4)])
    run_cells([text for text in CODE if '["gpu"]' in text], names)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "busy              40.0%",
        "environment       30.0%",
        "learn (launch)    15.0%",
    ]


def test_notebook_is_stored_without_outputs() -> None:
    """Outputs would be those of one machine, and change with every execution."""
    assert all(cell["outputs"] == [] for cell in CELLS if cell["cell_type"] == "code")


def test_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    """The same in a real notebook, where Jupyter is installed: progress is one output, updated in place."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.reads(shortened(NOTEBOOK.read_text()), as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.source.split("(")[0]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    [progress] = outputs["run = unidle.train"]
    assert "100 %" in progress["data"]["text/plain"]
    assert "last 100 episodes" in progress["data"]["text/html"]
