"""The wheel and the source distribution: complete, and enough to train."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

import unidle

BUILD = "from setuptools import build_meta as build; print(build.build_{kind}({folder!r}))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("package")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith("src/") or "/" not in name:
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    files = {}
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", BUILD.format(kind=kind, folder=str(folder / "dist"))]
        (folder / "dist").mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        files[kind] = folder / "dist" / done.stdout.splitlines()[-1]
    return files


def test_wheel_and_sdist_have_every_file_of_the_package(built: dict[str, Path]) -> None:
    package = ROOT / "src" / "unidle"
    tracked = subprocess.run(["git", "ls-files"], cwd=package, check=True, capture_output=True, text=True).stdout
    wanted = {f"unidle/{name}" for name in tracked.splitlines()}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert wanted <= set(wheel.namelist())
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in wanted} | {"LICENSE", "README.md", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_wheel_trains_without_the_repository(built: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(tmp_path / "installed")
    train = "import unidle, sys; from unidle.cli import main; print(unidle.__file__, flush=True); main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", train, "train", "CartPole-v1", "--n-steps", "64", "--timesteps", "64", "--eval-every=0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


def test_extra_all_has_every_other_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["all"] == [f"unidle[{','.join(sorted(set(extras) - {'all', 'dev'}))}]"]


def test_version_of_package_is_that_of_the_code() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == unidle.__version__
