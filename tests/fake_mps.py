"""A stand-in for nvidia-cuda-mps-control: a daemon that runs until it is told to quit, and its front end.

Each start, command and end is a line of the file $FAKE_MPS/calls.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROGRAM = """#!/bin/sh
pipes="${CUDA_MPS_PIPE_DIRECTORY:-$FAKE_MPS/default}"
if [ "$1" = -f ]; then
  if [ -e "$FAKE_MPS/broken" ]; then echo "Failed to start: out of order"; exit 1; fi
  echo "start $pipes $CUDA_MPS_LOG_DIRECTORY devices=$CUDA_VISIBLE_DEVICES" >> "$FAKE_MPS/calls"
  echo $$ > "$pipes/pid"
  while [ ! -e "$pipes/quit" ]; do sleep 0.02; done
  rm "$pipes/pid"
  echo ended >> "$FAKE_MPS/calls"
  exit 0
fi
read command
if [ ! -e "$pipes/pid" ]; then echo "Cannot find MPS control daemon process"; exit 1; fi
echo "$command" >> "$FAKE_MPS/calls"
if [ "$command" = quit ] && [ ! -e "$FAKE_MPS/deaf" ]; then touch "$pipes/quit"; fi
"""


class FakeMps:
    """The program in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mps"
        (self.folder / "default").mkdir(parents=True)
        program = self.folder / "nvidia-cuda-mps-control"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        self.environment = {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}", "FAKE_MPS": str(self.folder)}

    @property
    def calls(self) -> list[str]:
        """What it was asked to do so far."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def break_start(self) -> None:
        """From now on its daemon does not start."""
        (self.folder / "broken").touch()

    def ignore_quit(self) -> None:
        """From now on its daemon does not end when it is told to."""
        (self.folder / "deaf").touch()
