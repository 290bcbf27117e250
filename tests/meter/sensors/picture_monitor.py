"""Draws docs/images/monitor.svg: what `unidle monitor` shows of a recorded GPU at the recording's end.

    python tests/meter/sensors/picture_monitor.py tests/meter/sensors/recordings/h200.json.gz docs/images/monitor.svg

The part about the host is left out: it would be that of the machine which draws, and not of the one with the GPU.
"""

from __future__ import annotations

import io
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nvml_door import LOOKS_PER_PROCESS_LOOK, behind_the_door, binding, read
from replay_nvml import Player
from rich.console import CONSOLE_SVG_FORMAT, Console

import unidle.report.terminal.monitor
from unidle.report.terminal.monitor import Monitor

_WIDTH = 100
# Rich's frame, but with the reader's own font: a picture in a page may fetch none.
_FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "DejaVu Sans Mono, Menlo, Consolas"
)


class _ProcessesInTime:
    """Says when to look at processes: when it was done in the recording. Of those of this machine, it knows none."""

    def __init__(self) -> None:
        self._looks, self.processes = count(), ()

    def poll(self) -> bool:
        return next(self._looks) % LOOKS_PER_PROCESS_LOOK == 0


def drawn(recording: dict[str, Any]) -> str:
    """The picture, as SVG."""
    player = Player(recording)
    loaded = patch.object(binding(), "_LoadNvmlLibrary", lambda: None)
    timed = patch.object(unidle.report.terminal.monitor, "time", player.clock)
    with loaded, timed, behind_the_door(player.pointer, player.clock):
        monitor = Monitor()
        monitor._busiest = _ProcessesInTime()
        for at_ns in recording["looks"]:
            player.clock.move(at_ns)
            monitor.poll()
        shown = monitor.table(list(monitor.gpu_parts()), _WIDTH)
        monitor.close()
    assert not player.unanswered, player.unanswered
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(shown)
    return console.export_svg(title="unidle monitor", code_format=_FRAME)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(read(Path(sys.argv[1]))), encoding="utf-8")
