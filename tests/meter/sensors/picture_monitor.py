"""Draws docs/images/monitor.svg: what `unidle monitor` shows of a recorded GPU at the end of the recording.

    python tests/meter/sensors/picture_monitor.py tests/meter/sensors/recordings/h200.json.gz docs/images/monitor.svg

The host's readings are left out because they would come from the machine that draws, not from the recorded one.
"""

from __future__ import annotations

import io
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nvml_hook import POLLS_PER_PROCESS_POLL, binding, hooked, read
from replay_nvml import Player
from rich.console import CONSOLE_SVG_FORMAT, Console

import unidle.report.terminal.monitor
from unidle.report.terminal.monitor import Monitor

_WIDTH = 100
# Rich's frame with a local font: an image in a page cannot load fonts.
_FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "DejaVu Sans Mono, Menlo, Consolas"
)


class _RecordedProcessPolls:
    """Polls processes when the recording did; lists none of this machine."""

    def __init__(self) -> None:
        self._polls, self.processes = count(), ()

    def poll(self) -> bool:
        return next(self._polls) % POLLS_PER_PROCESS_POLL == 0


def drawn(recording: dict[str, Any]) -> str:
    """The image, as SVG."""
    player = Player(recording)
    loaded = patch.object(binding(), "_LoadNvmlLibrary", lambda: None)
    timed = patch.object(unidle.report.terminal.monitor, "time", player.clock)
    with loaded, timed, hooked(player.pointer, player.clock):
        monitor = Monitor()
        monitor._busiest = _RecordedProcessPolls()
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
