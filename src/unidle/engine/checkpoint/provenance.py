"""What a run was made with: command, versions, processors and git commit, for `provenance` in its config.yaml.

It is no setting: nothing that is trained depends on it. Environment variables, which hold secrets, are not recorded.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from unidle.config.machine import available_cores
from unidle.slurm.attempts import SlurmJob
from unidle.version import __version__

SECTION = "provenance"  # of config.yaml: one entry per process that trained, the first one first
_MAX_ENTRIES = 100  # a job that is requeued for weeks does not fill the file: the first, and the latest of the others
_GIT_TIMEOUT_S = 3.0
_CPU_INFO = Path("/proc/cpuinfo")
_SECRET = re.compile(r"(?i)(pass(word|wd)?|secret|token|credential|(api|access|private)[_-]?key)")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")  # https://user:password@host


def provenance(device: torch.device, cwd: Path) -> dict[str, Any]:
    """The entry for this process, which trains on `device` and was started in `cwd`."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "versions": {
            "unidle": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "gymnasium": gymnasium.__version__,
            "numpy": np.__version__,
        },
        "cpu": f"{_cpu_name()}, {available_cores()} cores",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "git": git_state(cwd),
        **({} if (job := SlurmJob.of(os.environ)) is None else {"slurm": job.plain()}),
    }


def with_entry(before: Any, entry: dict[str, Any]) -> list[Any]:
    """The entries of a config.yaml and a new one; what is no list, in an edited file, is dropped."""
    first, rest = (before[:1], before[1:]) if isinstance(before, list) else ([], [])
    return [*first, *rest[-(_MAX_ENTRIES - 2) :], entry]


def command_line(argv: Sequence[str]) -> str:
    """The command as a shell reads it, without the values of arguments that are called password, token and the like."""
    program, *arguments = argv or [""]
    path = Path(program)
    if path.name in ("unidle", "__main__.py") and "unidle" in path.parts[-2:]:
        start = ["unidle"]
    else:
        start = [program] if os.access(program, os.X_OK) and path.suffix != ".py" else ["python", program]
    shown: list[str] = []
    hides_next = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        is_secret = bool(_SECRET.search(name))
        if hides_next and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if is_secret and equals else _USER_INFO.sub("***@", word))
        hides_next = is_secret and not equals and word.startswith("-")
    return shlex.join([*start, *shown])


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out in `folder`, and whether tracked files differ from it; None if git cannot tell."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    command += ["status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
    try:
        found = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or too large a one
        return None
    lines = found.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if commit == "(initial)":  # no commit yet
        commit = None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
