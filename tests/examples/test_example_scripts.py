"""The scripts in examples/ run, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from unidle.config.files import read_yaml

EXAMPLES = ROOT / "examples"


def run(script: str, folder: Path, share: float = 0.1, before: tuple[str, ...] = (), *arguments: str) -> str:
    """What an example prints, with that share of its steps."""

    def fewer(found: re.Match[str]) -> str:
        return f"timesteps={int(int(found[1].replace('_', '')) * share)}"

    copy = folder / script
    copy.write_text(re.sub(r"timesteps=([\d_]+)", fewer, (EXAMPLES / script).read_text()))
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        [*before, sys.executable, script, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(folder)},  # no other trainers are found there
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Traceback" not in done.stdout
    assert "Warning" not in done.stdout
    return done.stdout


def config_of(folder: Path, run: str, file: str = "config.yaml") -> dict[str, Any]:
    """The settings of the only run of that name."""
    [path] = (folder / "runs").glob(f"{run}/{file}")
    return read_yaml(path)


def test_custom_environment_is_learned(tmp_path: Path) -> None:
    shown = run("custom_environment.py", tmp_path, share=0.5)
    found = re.search(r"mean return (\S+) in", shown)
    assert found is not None
    assert float(found[1]) > 0.8  # 0.91 at most
    assert "at 0.0: go right\nat 0.5: go right" in shown
    assert config_of(tmp_path, "Corridor-*")["run"]["env_kwargs"] == {"length": 9}


def test_image_environment_trains_a_cnn(tmp_path: Path) -> None:
    assert re.search(r"caught \d+%", run("image_environment.py", tmp_path))
    assert config_of(tmp_path, "Catch-*")["run"]["frame_stack"] == 2


def test_http_environment_browses_a_site(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    shown = run("http_environment.py", tmp_path)
    found = re.search(r"pages about astronomy: (\S+) of 20", shown)
    assert found is not None
    assert 0 < float(found[1]) < 20
    assert "failed" not in shown


def test_sweep_finds_settings(tmp_path: Path) -> None:
    shown = run("sweep.py", tmp_path)
    assert "6 of 6 trials" in shown
    best = config_of(tmp_path, "CartPole-v1-*", "best.yaml")["recipe"]
    assert best["net_arch"] in ([32], [64, 64])
    assert f"'net_arch': {best['net_arch']}, 'n_epochs': {best['n_epochs']}" in shown


def test_watch_names_the_slow_function_of_the_foreign_script(tmp_path: Path) -> None:
    shown = run("foreign_script.py", tmp_path, 1.0, ("unidle", "watch", "--"), "4")
    line = 1 + (EXAMPLES / "foreign_script.py").read_text().splitlines().index("        time.sleep(0.002)")
    assert re.search(r"\d+ episodes; the last one had \d+ steps", shown)
    assert f"Rendered.wait_for_renderer, foreign_script.py:{line}" in shown
    assert "unidle" not in re.sub(r'""".*?"""', "", (EXAMPLES / "foreign_script.py").read_text(), flags=re.DOTALL)


def test_readme_lists_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in names if f"({name})" not in readme] == []
    assert len(names) == 6
