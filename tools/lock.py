"""Renews the lock files: the versions that `make setup` and `make demo` install, with their hashes.

    make lock                    # keeps every version that still fits pyproject.toml
    make lock UPGRADE=--upgrade  # the latest versions

uv resolves for all supported versions of Python at once, and lists the hashes of all files that the index has of a
version. requirements-dev.lock has them all, and requirements.lock those that unidle needs without extras. Torch's CUDA
libraries go to a file of their own, because torch's CPU build does not need them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from packaging.markers import Marker
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK, CORE_LOCK, CUDA_LOCK = (ROOT / f"requirements{part}.lock" for part in ("-dev", "", "-cuda"))
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = "# Written by `make lock`; `make setup` installs these versions and verifies their hashes.\n"
_BUILD = "setuptools"  # builds unidle itself
_CUDA = re.compile(r"cuda-|nvidia-(?!ml-py$)")
_PIN = re.compile(r"([\w.-]+)==([^\s;]+)(?: ; (.+?))?((?: --hash=sha256:[0-9a-f]{64})+)")


@dataclass(frozen=True)
class Pin:
    """One version of a package."""

    name: str
    version: str
    marker: str  # empty: for every machine
    hashes: frozenset[str]
    comment: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}=={self.version}{self.marker and f' ; {self.marker}'}"]
        lines += [f"    --hash=sha256:{value}" for value in sorted(self.hashes)]
        return (f"# {self.comment}\n" if self.comment else "") + " \\\n".join(lines)


def parse(text: str) -> list[Pin]:
    """The pins of a lock file."""
    pins, comment = [], ""
    for line in re.sub(r"\s*\\\n\s*", " ", text.replace(HEADER, "")).splitlines():
        if line.startswith("#"):
            comment = line.removeprefix("# ")
        elif found := _PIN.fullmatch(line):
            name, version, marker, hashes = found.groups(default="")
            pins.append(Pin(name, version, marker, frozenset(re.findall(r"[0-9a-f]{64}", hashes)), comment))
            comment = ""
        elif line:
            raise ValueError(f"not a pin with hashes: {line}")
    return pins


def machines() -> list[dict[str, str]]:
    """What markers see on each kind of machine that unidle supports, where it may differ from this one."""
    linux = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
    return [
        {**linux, "python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
        for python, machine in product(PYTHONS, ("x86_64", "aarch64"))
    ]


def for_supported_machines(pins: list[Pin]) -> list[Pin]:
    """`pins` without those that no supported machine installs, and without markers that hold on all of them."""
    kept = []
    for pin in pins:
        holds = [Marker(pin.marker).evaluate(machine) for machine in machines()] if pin.marker else [True]
        if any(holds):
            kept.append(replace(pin, marker="" if all(holds) else pin.marker))
    return kept


def resolve(locked: str, options: list[str]) -> list[Pin]:
    """The versions that pyproject.toml needs with these options, `locked` ones where they fit."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "lock")
        output.write_text(locked)
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"]
        command += ["--universal", "--python-version", PYTHONS[0], "--generate-hashes", "--no-annotate", "--no-header"]
        subprocess.run([*command, "--output-file", str(output), *options], cwd=ROOT, check=True, stdout=sys.stderr)
        return parse(output.read_text())


def with_local_build(torch: Pin, before: list[Pin]) -> Pin:
    """`torch` with the hash of the build that pip installs on this machine, which may not be the index's."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--report", "-", f"torch=={torch.version}"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (item,) = report["install"]
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    build = Version(item["metadata"]["version"]).local
    if build and digest not in torch.hashes:
        comment = f"{digest[:8]}… is the {build.upper()} build for Python {sys.version_info[0]}.{sys.version_info[1]}."
        torch = replace(torch, hashes=torch.hashes | {digest}, comment=comment)
    for old in before:  # renewed on a machine without that build
        if (old.name, old.version) == (torch.name, torch.version) and not torch.comment:
            torch = replace(torch, hashes=torch.hashes | old.hashes, comment=old.comment)
    return torch


def main() -> None:
    """Write both files; arguments are passed on to uv."""
    locked = "".join(file.read_text() for file in (LOCK, CUDA_LOCK) if file.exists())
    pins = for_supported_machines(resolve(locked, ["--extra", "dev", *sys.argv[1:]]))
    core = {pin.name for pin in resolve("\n".join(map(str, pins)) + "\n", [])} | {_BUILD}
    pins = [with_local_build(pin, parse(locked)) if pin.name == "torch" else pin for pin in pins]
    libraries = [pin for pin in pins if _CUDA.match(pin.name)]
    others = [pin for pin in pins if pin not in libraries]
    chosen = {LOCK: others, CORE_LOCK: [pin for pin in others if pin.name in core], CUDA_LOCK: libraries}
    for file, pinned in chosen.items():
        file.write_text(HEADER + "\n".join(map(str, pinned)) + "\n")


if __name__ == "__main__":
    main()
