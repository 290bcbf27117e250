"""Runs another program concurrently with a job: it starts before the job and ends with it, even if the job fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_PATIENCE_S = 20.0
_READY = "ready"

# It runs until its stdin closes, which happens when its parent exits, even if the parent is killed.
_HOLD_GPU_MEMORY = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("{_READY}", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program that reports when it is ready and exits when its stdin closes."""
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        said = program.stdout.readline().strip()
        if said != _READY:
            raise RuntimeError(f"The concurrent program did not get ready: {said or 'it ended'}.")
        yield program
    finally:
        program.stdin.close()
        try:
            program.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        program.stdout.close()


def gpu_memory_held(room: int) -> list[str]:
    """Return the command of a program that occupies all GPU memory except `room` bytes."""
    return [sys.executable, "-c", _HOLD_GPU_MEMORY, str(room)]
