"""Submits the script of a job with sbatch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from unidle.config.files import display_path
from unidle.errors import UsageError
from unidle.slurm.script import Script
from unidle.writing import write_atomically

SCRIPT = "slurm.sh"  # in the folder of the run, group or sweep


def require_sbatch() -> None:
    """UsageError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "The command sbatch is not on this machine; log in to a node that submits SLURM jobs, or add --dry-run to "
            "see the script."
        )


def refuse_second_job(folder: Path) -> None:
    """UsageError if a job was submitted for this folder before."""
    if (folder / SCRIPT).exists():
        shown = display_path(folder / SCRIPT)
        raise UsageError(
            f"A job was submitted for {display_path(folder)} before; to continue it, submit it again: sbatch {shown}, "
            "or add --resume auto."
        )


class JobRefusedError(UsageError):
    """SLURM has not accepted the job."""


def write_script(script: Script) -> Path:
    """Write the script into its folder; returns its path."""
    return write_atomically(script.folder / SCRIPT, script.text())


def submit(path: Path, cwd: Path) -> str:
    """Submit a script; returns the id of the job. JobRefusedError if SLURM refuses it."""
    words = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise JobRefusedError(f"sbatch cannot be started ({error.strerror}); check it in a shell.") from None
    if done.returncode:
        reasons = [line.partition("error: ")[2] or line for line in done.stderr.splitlines() if line.strip()]
        raise JobRefusedError(f"SLURM refused the job: {' '.join(reasons[:1]) or 'sbatch gave no reason'}.")
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")
    found = re.search(r"^(\d+)", done.stdout, re.MULTILINE)  # after it, perhaps the name of a cluster
    if found is None:
        raise UsageError(f"sbatch printed no job id, but {done.stdout.strip()[:200]!r}; look for the job with squeue.")
    return found[1]
