"""The scripts in examples/sb3 run, on unidle and, with only the import changed, on Stable-Baselines3."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from paths import ROOT

SCRIPTS = sorted((ROOT / "examples" / "sb3").glob("*.py"))
LEAVES = {  # what a script is for
    "basic": "cartpole.zip",
    "callback": "best.zip",
    "evaluation": "logs/best_model.zip",
    "learning_curve": "learning_curve.png",
    "normalisation": "statistics.pkl",
}


def shortened(text: str) -> str:
    """A hundredth of the steps."""
    return re.sub(r"total_timesteps=([\d_]+)", lambda found: f"total_timesteps={int(found[1]) // 100}", text)


@pytest.mark.parametrize("library", ["unidle.sb3", "stable_baselines3"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_on_either_library(
    script: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("stable_baselines3")
    text = script.read_text()
    imports = re.findall(r"^from (unidle\.sb3\S*) import", text, re.MULTILINE)
    assert imports
    assert text.count("unidle") == len(imports)  # nothing else is unidle's
    copy = tmp_path / script.name
    copy.write_text(shortened(text.replace("unidle.sb3", library)))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(copy), run_name="__main__")
    assert (tmp_path / LEAVES.get(script.stem, script.name)).is_file()


def test_there_are_ten_scripts() -> None:
    assert len(SCRIPTS) == 10
