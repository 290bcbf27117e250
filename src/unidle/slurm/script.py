"""The sbatch script of a job, as text."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidle.errors import UsageError
from unidle.slurm.resources import Resources

TASK = "\0"  # in paths and in the words of a command: the id of the array's task
_VARIABLE = '"$SLURM_ARRAY_TASK_ID"'
# Variables that change what a job does, also where the cluster does not pass on the environment; none is a secret.
_PASSED_ON = ("PYTHONPATH", "NUM_PARALLEL_ENVS", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR")


@dataclass(frozen=True)
class Script:
    """What a job runs, and where."""

    name: str
    folder: Path  # of the run, group or sweep
    run: str  # folder of the task, below `folder`, in which the output is; may contain TASK
    command: Sequence[str]  # the arguments of `unidle`; may contain TASK
    resources: Resources
    cwd: Path
    array: str | None = None

    @property
    def output(self) -> str:
        """The path of the output, as in sbatch's --output."""
        folder = _escaped_pattern(self.folder / self.run).replace(TASK, "%a")
        return f"{folder}/slurm-{'%j' if self.array is None else '%A_%a'}.out"

    def output_of(self, job: str) -> Path:
        """The path of the output of a submitted job; of an array, with * for the id of a task."""
        name = f"slurm-{job}{'' if self.array is None else '_*'}.out"
        return self.folder / self.run.replace(TASK, "*") / name

    def text(self) -> str:
        """The script."""
        options = [("job-name", self.name), *self.resources.options()]
        if self.array is not None:
            options.append(("array", self.array))
        options += [
            # B: only the script's own process gets it, which is the supervisor; without it, only job steps would.
            ("signal", f"B:USR1@{self.resources.signal}"),
            ("requeue", ""),
            ("open-mode", "append"),
            ("output", self.output),
        ]
        supervisor = [sys.executable, "-m", "unidle.slurm", "--folder", str(self.folder / self.run)]
        supervisor += ["--cores", str(self.resources.cpus_per_task), "--"]
        lines = ["#!/bin/bash", *(_directive(name, value) for name, value in options), ""]
        lines += [f"cd {shlex.quote(str(self.cwd))} || exit 1"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in passed_on(os.environ).items()]
        if sys.prefix != sys.base_prefix:
            lines += [f"export VIRTUAL_ENV={shlex.quote(sys.prefix)}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"']
        lines += [f"exec {_command(supervisor)} \\", f"  {_command(self.command)}", ""]
        return "\n".join(lines)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the script sets."""
    return {name: environment[name] for name in _PASSED_ON if name in environment}


def _directive(name: str, value: str) -> str:
    """A line for sbatch, which has quotes and a backslash as an escape, but no other syntax of the shell."""
    if "\n" in value:
        raise UsageError(f"--{name} has a line break, which SLURM cannot read; remove it.")
    if not re.fullmatch(r"[\w@%+=:,./-]*", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


def _escaped_pattern(path: Path) -> str:
    """A path without sbatch's patterns (%j)."""
    if "\\" in str(path):  # switches all patterns off
        raise UsageError(
            f"SLURM cannot write to {path}, which has a backslash; choose another --runs-dir or --run-name."
        )
    return str(path).replace("%", "%%")


def _command(words: Sequence[str]) -> str:
    """Words for the shell, in which only TASK is replaced."""
    parts = [[shlex.quote(part) if part else "" for part in word.split(TASK)] for word in words]
    return " ".join(_VARIABLE.join(each) or "''" for each in parts)
