"""`unidle pack`: run several commands side by side on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import TABLE_WIDTH, parse, wants_help
from unidle.cli.results import WithCode
from unidle.config.settings import OrAuto
from unidle.errors import UsageError


@dataclass(frozen=True)
class _PackFlags:
    """Run several commands side by side on one machine and GPU.

    unidle pack jobs.yaml, or: unidle pack -- unidle train --env … -- python sb3_script.py

    For jobs that cannot share a process: other recipes, other trainers, your own scripts. Each job gets cores of its
    own and one thread per process for OpenMP and the like (OMP_NUM_THREADS, unless you set it). With NVIDIA MPS, which
    is started in a private folder and ended afterwards, their kernels run on the GPU at the same time. A job that
    fails leaves the others running. Ctrl-C stops all of them, a second one ends them immediately, and no process is
    left behind. The exit code is 0 if all succeeded, else that of the first job that failed.

    jobs.yaml lists jobs with name and command and, if needed, cores, gpu_memory (4 GB), env and cwd.
    """

    jobs: Annotated[Path | None, tyro.conf.Positional] = None
    """File with the jobs; leave it out if the commands follow, each after `--`."""
    at_once: OrAuto[int] = None
    """Jobs that run at the same time; the others wait for their turn. auto: all of them."""
    out: Path | None = None
    """Folder for the output of each job and a summary; default: packs/<date and time>."""
    mps: bool = True
    """Use NVIDIA MPS if it is installed; without it, the jobs take turns on the GPU."""
    json: bool = False
    """Print the summary as a JSON object."""


def pack_command(argv: list[str]) -> WithCode:
    """`unidle pack`"""
    split = argv.index("--") if "--" in argv else len(argv)
    own, commands = argv[:split], argv[split:]
    flags = parse(_PackFlags, own, "pack")
    if (flags.jobs is None) == (not commands) and not wants_help(own):
        given = "both a file and commands" if commands else "no jobs"
        raise UsageError(
            f"There are {given}; use: unidle pack jobs.yaml, or unidle pack -- python a.py -- python b.py."
        )

    from rich.console import Console

    from unidle.packing.jobs import jobs_from_arguments, read_jobs
    from unidle.packing.pack import Pack
    from unidle.report.terminal.pack import PackTable, print_closing_table

    jobs = read_jobs(flags.jobs) if flags.jobs is not None else jobs_from_arguments(commands)
    table = PackTable(Console(stderr=True, highlight=False))
    pack = Pack(jobs, table, at_once=flags.at_once, out=flags.out, use_mps=flags.mps)
    with table:
        pack.run()
    if flags.json:
        return WithCode(pack.plain(), pack.exit_code)
    console = Console(highlight=False)
    print_closing_table(console if console.is_terminal else Console(highlight=False, width=TABLE_WIDTH), pack)
    return WithCode(None, pack.exit_code)
