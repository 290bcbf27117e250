"""`unidle monitor`: show live GPU and CPU readings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unidle.cli.flags import TABLE_WIDTH, Result, parse
from unidle.errors import UsageError


@dataclass(frozen=True)
class _MonitorFlags:
    """Show live GPU and CPU readings until Ctrl-C.

    Each reading has its minimum, mean and maximum over the last ten seconds, a sparkline that keeps short bursts, and
    its actual update rate, without repeated samples of an old value. – marks a reading that a GPU does not provide.
    Without an NVIDIA GPU, only the CPU is shown.
    """

    interval: float = 0.1
    """Seconds between samples; NVIDIA drivers update their readings at most ten times per second."""
    csv: Path | None = None
    """Also append each new value to this file: time, source, reading, value, unit."""
    pid: int | None = None
    """Also show the total usage of this process and its descendants."""
    once: bool = False
    """Sample for one second, print one table and exit."""
    json: bool = False
    """Sample for one second and print the result as a JSON object."""


def monitor_command(argv: list[str]) -> Result:
    """`unidle monitor`"""
    flags = parse(_MonitorFlags, argv, "monitor")
    if not 0.01 <= flags.interval <= 60:
        raise UsageError(f"--interval {flags.interval:g} is not between 0.01 and 60 seconds; 0.1 suits most GPUs.")

    from rich.console import Console

    from unidle.report.terminal.monitor import ONCE_S, WINDOW_S, Monitor, sample_once, watch

    is_once = flags.once or flags.json
    monitor = Monitor(flags.pid, flags.csv, ONCE_S if is_once else WINDOW_S)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH)
    try:
        if not is_once:
            watch(monitor, console, flags.interval)
            return None
        sample_once(monitor, flags.interval)
        if flags.json:
            return monitor.result()
        console.print(monitor.panel(console.width))
    except KeyboardInterrupt:
        pass  # there is nothing to save
    finally:
        monitor.close()
    return None
