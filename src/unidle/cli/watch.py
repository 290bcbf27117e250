"""`unidle watch`: run any command, and report what its GPU waited for."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from unidle.cli.flags import Result, parse, wants_help
from unidle.errors import UsageError


@dataclass(frozen=True)
class _WatchFlags:
    """Run any command unchanged and report at its end what its GPU waited for: unidle watch -- python train.py

    Works with any Python training program and library. Input, output, signals and exit status pass through; the report
    goes to standard error. Without a GPU, it reports where the main process spent its time.
    """

    out: Path | None = None
    """Also write the report to this folder: watch.json and watch.txt."""
    windows: bool = False
    """Run torch's profiler at intervals to see when kernels run; not for programs that capture CUDA graphs."""


def watch_command(argv: list[str]) -> Result:
    """`unidle watch`; ends with the exit status of the command, or by the signal that ended it."""
    split = argv.index("--") if "--" in argv else len(argv)
    command = argv[split + 1 :]
    if not command and not wants_help(argv):
        raise UsageError("No command given; put it after `--`: unidle watch -- python train.py.")
    flags = parse(_WatchFlags, argv[:split], "watch")

    from unidle.meter.watch.command import exit_like, watch
    from unidle.report.terminal.watch import conclude, lines, write

    if flags.out:  # fail now, not after hours of training
        _make_folder(flags.out)
    watched = watch(command, windows=flags.windows)
    try:  # a failed report must not change the command's exit status
        found = conclude(watched)
        try:
            print("", *lines(watched, *found), sep="\n", file=sys.stderr, flush=True)
        finally:
            if flags.out:
                write(flags.out, watched, *found)
    except OSError as error:
        print(f"unidle: The report could not be written: {error.strerror}.", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        exit_like(watched.status)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be created ({error.strerror}); choose another folder.") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--out {path} is not writable; choose another folder.")
