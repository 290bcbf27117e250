"""The container recipes, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from paths import ROOT
from pip._internal.commands import create_command

sys.path.insert(0, str(ROOT / "tools"))
import lock

CONTAINERS = ROOT / "containers"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKER, APPTAINER = ((CONTAINERS / name).read_text() for name in ("Dockerfile", "unidle.def"))
RECORD = """#!/bin/bash
printf "%s\\n" "$(pwd)" "$@" "" >> "$RECORD"
for word in "$@"; do if [ -f "$word" ]; then cat "$word" > "$RECORD.file"; fi; done
"""


def docker(instruction: str) -> list[str]:
    """The arguments of an instruction, one string for each time that it is there."""
    return re.findall(rf"^{instruction} (.+)$", DOCKER.replace("\\\n", ""), re.MULTILINE)


def section(name: str) -> list[str]:
    """The lines of a section of the Apptainer recipe."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", APPTAINER, re.MULTILINE | re.DOTALL)
    assert found is not None
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def test_both_recipes_are_the_same_system() -> None:
    (docker_base,) = docker("FROM")
    (apptainer_base,) = re.findall(r"^From: (.+)$", APPTAINER, re.MULTILINE)
    assert docker_base == apptainer_base
    packages = re.compile(r"apt-get install --yes --no-install-recommends ([\w -]+\w)")
    assert packages.findall(DOCKER) == packages.findall(APPTAINER)
    environment = re.findall(r"\w+=\S+", docker("ENV")[0])
    assert section("environment") == [f"export {' '.join(environment)}"]


def test_python_of_the_image_is_one_that_the_locks_are_for() -> None:
    found = re.search(r"python:(3\.\d+)-", docker("FROM")[0])
    assert found is not None
    assert found[1] in lock.PYTHONS
    assert SpecifierSet(PROJECT["requires-python"]).contains(found[1])


def test_labels_have_the_version_of_the_package() -> None:
    versions = re.findall(r'image\.version[= ]"?([^"\s]+)', DOCKER + APPTAINER)
    assert versions == [PROJECT["version"]] * 2


def test_copied_files_exist_and_are_the_same_in_both() -> None:
    copied = {}
    for line in docker("COPY"):
        *sources, target = line.split()
        for source in sources:
            copied[source] = target + source if target.endswith("/") else target
    assert copied == dict(line.split() for line in section("files"))
    assert all((ROOT / source).exists() for source in copied)
    assert all(target == f"/opt/unidle/{source}" for source, target in copied.items())


def test_scripts_are_valid() -> None:
    for script in ("\n".join(section("post")), "\n".join(section("runscript")), *docker("RUN")):
        subprocess.run(["sh", "-n"], input=script.replace("{{ extras }}", "none"), text=True, check=True)
    subprocess.run(["bash", "-n", str(CONTAINERS / "install")], check=True)
    assert os.access(CONTAINERS / "install", os.X_OK)
    assert "/opt/unidle/containers/install /opt/unidle" in DOCKER
    assert "/opt/unidle/containers/install /opt/unidle" in APPTAINER
    assert json.loads(docker("ENTRYPOINT")[0]) == ["unidle"] == list(PROJECT["scripts"])


@pytest.mark.parametrize("extras", ["", "metaworld,wandb"])
def test_install_gives_pip_the_locked_versions(extras: str, tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(RECORD)
    pip.chmod(0o755)
    record = tmp_path / "record"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record)}
    subprocess.run([str(CONTAINERS / "install"), str(ROOT), extras], env=environment, check=True)
    calls = [call.split("\n") for call in record.read_text().strip().split("\n\n")]
    assert all(call[0] == str(ROOT) for call in calls)
    installs = [call[2:] for call in calls if call[1] == "install"]
    assert calls[-1][1:] == ["check"]
    files = []
    for words in installs:
        options, rest = create_command("install").parse_args(words)  # pip's own parser ends on a mistake
        files += options.requirements
        assert options.require_hashes == bool(options.requirements)
        assert rest in ([], ["."], [f".[{extras}]"])
    assert files == ["requirements.lock", "requirements-cuda.lock"]
    if extras:
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        pins = [Requirement(line) for line in Path(f"{record}.file").read_text().splitlines()]
        wanted = {(pin.name, f"=={pin.version}") for pin in lock.parse(lock.LOCK.read_text())}
        assert {(pin.name, str(pin.specifier)) for pin in pins} == wanted
