"""The lock: complete, hashed, and the only thing that `make setup` installs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import lock

PINS = lock.parse(lock.LOCK.read_text())
HASH = "0" * 64


def wanted(extra: str | None) -> list[Requirement]:
    """What pyproject.toml requires, with an extra and the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"][extra] if extra else []
    found = [Requirement(text) for text in [*project["dependencies"], *extras]]
    own = [requirement for requirement in found if requirement.name == "unidle"]
    return [r for r in found if r not in own] + [r for o in own for name in o.extras for r in wanted(name)]


@pytest.mark.parametrize("machine", lock.machines(), ids=lambda m: f"{m['python_version']}-{m['platform_machine']}")
def test_lock_has_one_fitting_version_of_each_requirement(machine: dict[str, str]) -> None:
    here = [pin for pin in PINS if not pin.marker or Marker(pin.marker).evaluate(machine)]
    versions = {canonicalize_name(pin.name): pin.version for pin in here}
    assert len(versions) == len(here)
    for requirement in wanted("dev"):
        if requirement.marker is None or requirement.marker.evaluate(machine):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_lock_files_are_pins_with_hashes_and_nothing_else() -> None:
    for file in (lock.LOCK, lock.CORE_LOCK, lock.CUDA_LOCK):
        text = file.read_text()
        pins = lock.parse(text)  # refuses a line without hashes
        assert text == lock.HEADER + "\n".join(map(str, pins)) + "\n"
        assert "//" not in text  # an address of an index
    cuda = [pin.name for pin in lock.parse(lock.CUDA_LOCK.read_text())]
    assert "nvidia-cublas" in cuda
    assert not {"torch", "triton", "nvidia-ml-py"} & set(cuda)


def test_core_lock_has_what_unidle_needs_without_extras() -> None:
    core = lock.parse(lock.CORE_LOCK.read_text())
    names = {canonicalize_name(pin.name) for pin in core}
    assert {canonicalize_name(requirement.name) for requirement in wanted(None)} | {"setuptools"} <= names
    assert all(pin in PINS for pin in core)
    assert not {"jax", "playwright", "pytest", "stable-baselines3"} & names


def test_setup_verifies_hashes_of_all_that_it_downloads() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "setup"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    installs = [part for line in printed.splitlines() for part in line.split("; ") if "pip install" in part]
    own = [install for install in installs if "--editable" in install]
    locked = [install for install in installs if install not in own]
    assert (len(locked), len(own)) == (4, 2)
    assert all("--require-hashes --only-binary :all:" in install for install in locked)
    assert all("--no-index" in install for install in own)


def test_demo_installs_no_development_tools() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "requirements.lock" in printed
    assert "requirements-dev.lock" not in printed
    assert printed.rstrip().endswith("unidle demo")


def test_line_without_hash_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a pin with hashes: zipp==4\.1\.2"):
        lock.parse("zipp==4.1.2\n")


def test_pins_that_no_supported_machine_installs_are_dropped() -> None:
    pin = lock.Pin("zipp", "4.1.2", "", frozenset({HASH}))
    everywhere, windows = replace(pin, marker="os_name == 'posix'"), replace(pin, marker="sys_platform == 'win32'")
    arm = replace(pin, marker="platform_machine == 'aarch64'")
    assert lock.for_supported_machines([everywhere, windows, arm]) == [pin, arm]
    assert lock.parse(str(arm)) == [arm]
