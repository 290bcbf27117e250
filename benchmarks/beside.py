"""Another program beside a job: it is there before the job starts, and gone when that is over, however it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_PATIENCE_S = 20.0
_READY = "ready"

# It goes on until its input ends, which it does with whoever started it, even if that is killed.
_HOLD_GPU_MEMORY = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("{_READY}", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says when it is ready, and ends when its input does."""
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        said = program.stdout.readline().strip()
        if said != _READY:
            raise RuntimeError(f"The program beside the job was not ready: {said or 'it ended'}.")
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
    """The command of a program that takes all memory of the GPU but `room` bytes."""
    return [sys.executable, "-c", _HOLD_GPU_MEMORY, str(room)]
