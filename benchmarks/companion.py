"""Runs a companion program during a job: it starts before the job and ends with it, even if the job fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_EXIT_TIMEOUT_S = 20.0
_READY = "ready"

# It runs until its stdin is closed. That also happens if its parent is killed.
_HOLD_GPU_MEMORY = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("{_READY}", flush=True)
sys.stdin.read()
"""


_TAKE_A_CORE = f"""
import sys, threading
closed = threading.Event()
threading.Thread(target=lambda: (print("{_READY}", flush=True), sys.stdin.read(), closed.set())).start()
while not closed.is_set():
    sum(range(10_000))
"""


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program that reports when it is ready and exits when its stdin closes."""
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        output = program.stdout.readline().strip()
        if output != _READY:
            raise RuntimeError(f"The concurrent program did not get ready: {output or 'it ended'}.")
        yield program
    finally:
        program.stdin.close()
        try:
            program.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        program.stdout.close()


def gpu_memory_held(free: int) -> list[str]:
    """Return the command of a program that occupies all GPU memory except `free` bytes."""
    return [sys.executable, "-c", _HOLD_GPU_MEMORY, str(free)]


def core_taken() -> list[str]:
    """Return the command of a program that computes all the time, with one thread."""
    return [sys.executable, "-c", _TAKE_A_CORE]
