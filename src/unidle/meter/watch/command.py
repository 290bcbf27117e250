"""Runs a command unchanged and polls the machine's sensors until it ends.

The command keeps its standard streams, terminal, arguments and exit status. Only PYTHONPATH gets an extra folder, which
starts the sampler in each of its Python processes. Signals sent to the watcher are forwarded, except those from the
terminal, which the command already receives as a member of the same process group.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unidle.errors import UsageError
from unidle.meter.sensors.host import Host, Tree
from unidle.meter.sensors.lifetime import LifetimeStats
from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.meter.sensors.reading import Sample, Source
from unidle.meter.watch.inside.unidle_utilisation import append_readings
from unidle.meter.watch.samples import Process, read_processes

_INSIDE = Path(__file__).parent / "inside"
_USE = "utilisation"
_GPU_EVERY_S, _HOST_EVERY_S = 0.1, 1.0  # scanning all processes takes milliseconds
_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_SI_KERNEL = 128  # si_code of a signal from the kernel, such as the terminal's


@dataclass(frozen=True)
class WatchedCommand:
    """A finished command and everything that was measured."""

    command: tuple[str, ...]
    status: int
    """Exit status; negative: the signal that ended it."""
    begun_ns: int
    ended_ns: int
    """By perf_counter_ns."""
    cores: int
    readings: Mapping[str, Mapping[str, LifetimeStats]]
    """By source and reading, without unavailable ones."""
    models: Mapping[str, str]
    """GPU → model name."""
    used: frozenset[str]
    """GPUs on which the driver saw a process of the command; empty in many containers, where it does not say."""
    no_gpu: str | None
    processes: tuple[Process, ...]

    @property
    def seconds(self) -> float:
        """Duration of the command."""
        return (self.ended_ns - self.begun_ns) * 1e-9

    @property
    def cores_used(self) -> float | None:
        """Mean number of cores used by the command."""
        trees = (stats["cpu"] for name, stats in self.readings.items() if name.startswith("pid") and "cpu" in stats)
        return next((cpu.mean for cpu in trees), None)

    @property
    def others_cores(self) -> float | None:
        """Mean number of cores used by other programs."""
        cpu = self.readings["host"].get("cpu")
        if cpu is None or cpu.mean is None or self.cores_used is None:
            return None
        return max(0.0, self.cores * cpu.mean / 100 - self.cores_used)

    @property
    def gpu_use(self) -> LifetimeStats | None:
        """Utilisation of the command's busiest GPU in percent, or of the busiest GPU if it is unknown which it uses."""
        busiest = _busiest(self.readings, self.used or self.models)
        return None if busiest is None else self.readings[busiest][_USE]


def watch(command: Sequence[str], *, windows: bool = False) -> WatchedCommand:
    """Run `command` to its end; with `windows`, torch's profiler is turned on in it from time to time."""
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"Program `{command[0]}` not found; use, for example: unidle watch -- python train.py.")
    host, driver = Host(), Driver()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is inherited as ignored, the exit status is lost
    with tempfile.TemporaryDirectory(prefix="unidle-watch-", ignore_cleanup_errors=True) as name:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
        begun_ns = time.perf_counter_ns()
        try:
            try:
                pid = os.posix_spawn(
                    program,
                    list(command),
                    _environment(name, windows),
                    setsigmask=before,
                    setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python, not by others
                )
            except OSError as error:
                raise UsageError(f"Cannot run `{command[0]}`: {error.strerror}.") from None
            stats, used, status = _poll_until_end(pid, driver.gpus, host, Tree(pid), name)
            ended_ns = time.perf_counter_ns()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            models = {gpu.name: gpu.model for gpu in driver.gpus}
            driver.close()
        return WatchedCommand(
            tuple(command),
            status,
            begun_ns,
            ended_ns,
            len(host.cores),
            stats,
            models,
            frozenset(used),
            driver.no_gpu_reason,
            tuple(read_processes(Path(name))),
        )


def exit_like(status: int) -> NoReturn:
    """Exit as the command did: with its exit status or by the same signal."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has already dumped its core
        with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP have no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)


def _environment(folder: str, windows: bool) -> dict[str, str]:
    paths = [str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "UNIDLE_WATCH": folder}
    if windows:  # keep the profiler out of the command's output
        found |= {"UNIDLE_WATCH_WINDOWS": "1", "KINETO_LOG_LEVEL": "99"}
    return found


def _poll_until_end(
    pid: int, gpus: Sequence[Gpu], host: Host, tree: Tree, folder: str
) -> tuple[dict[str, dict[str, LifetimeStats]], set[str], int]:
    """Poll all sensors until the process ends, and pass GPU utilisation on to its samplers through `folder`.

    Returns the readings' statistics, the GPUs it used, and its exit status.
    """
    sources: list[Source] = [*gpus, host, tree]
    stats: dict[str, dict[str, LifetimeStats]] = {source.name: {} for source in sources}
    used: set[str] = set()
    next_host = time.monotonic() + _HOST_EVERY_S / 4
    while True:
        arrived = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, _GPU_EVERY_S if gpus else _HOST_EVERY_S / 4)
        if arrived is not None and arrived.si_signo != signal.SIGCHLD and arrived.si_code != _SI_KERNEL:
            os.kill(pid, arrived.si_signo)
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            return stats, used, os.waitstatus_to_exitcode(how)
        is_due = time.monotonic() >= next_host
        utilisation: dict[str, list[Sample]] = {}
        for source in [*sources] if is_due else [source for source in sources if source in gpus]:
            try:
                found = source.poll()
            except Exception:  # a failing sensor must not end the watch
                sources.remove(source)
                continue
            for reading, samples in found.items():
                if samples:
                    stats[source.name].setdefault(reading, LifetimeStats()).add(samples)
                    if reading == _USE:
                        utilisation[source.name] = samples
        busiest = _busiest(stats, used or {gpu.name for gpu in gpus})
        if busiest is not None and busiest in utilisation:
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                append_readings(folder, [(sample.at_ns, sample.value) for sample in utilisation[busiest]])
        if is_due:
            next_host = time.monotonic() + _HOST_EVERY_S
            used |= {gpu.name for gpu in gpus if _is_used(gpu, tree)}


def _busiest(readings: Mapping[str, Mapping[str, LifetimeStats]], gpus: Iterable[str]) -> str | None:
    """Return the GPU with the highest mean utilisation so far; None if none reports it."""
    known = (gpu for gpu in gpus if _USE in readings[gpu])
    return max(known, key=lambda gpu: readings[gpu][_USE].mean or 0.0, default=None)


def _is_used(gpu: Gpu, tree: Tree) -> bool:
    gpu.poll_processes()
    return any(process.pid in tree.pids for process in gpu.processes or ())
