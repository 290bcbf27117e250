"""Runs a command as it is, and reads the machine while it lasts.

The command keeps its standard streams, its terminal, its arguments and its exit status. What is added is a folder on
PYTHONPATH, for the sampler in each of its Python processes. A signal that was sent to the watcher is passed on; one
that the terminal sent has reached the command already, for it is in the same group, and is not sent twice.
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
from unidle.meter.sensors.lifetime import Life
from unidle.meter.sensors.nvml import Driver, Gpu
from unidle.meter.sensors.reading import Sample, Source
from unidle.meter.watch.inside.unidle_use import tell
from unidle.meter.watch.samples import Process, read_processes

_INSIDE = Path(__file__).parent / "inside"
_USE = "utilisation"
_GPU_EVERY_S, _HOST_EVERY_S = 0.1, 1.0  # to look through all processes takes milliseconds
_PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_BY_THE_KERNEL = 128  # si_code of a signal that no process sent, such as the terminal's


@dataclass(frozen=True)
class Watched:
    """A command that has ended, and what was seen of it."""

    command: tuple[str, ...]
    status: int
    """Exit status; below 0: the signal that ended it."""
    begun_ns: int
    ended_ns: int
    """By perf_counter_ns."""
    cores: int
    readings: Mapping[str, Mapping[str, Life]]
    """By source and reading; what a source lacks is not in it."""
    models: Mapping[str, str]
    """GPU → what it is."""
    used: frozenset[str]
    """GPUs on which the driver saw a process of the command; none where it does not tell, as in many containers."""
    no_gpu: str | None
    processes: tuple[Process, ...]

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return (self.ended_ns - self.begun_ns) * 1e-9

    @property
    def cores_used(self) -> float | None:
        """By the command, on average."""
        trees = (lives["cpu"] for name, lives in self.readings.items() if name.startswith("pid") and "cpu" in lives)
        return next((life.mean for life in trees), None)

    @property
    def others_cores(self) -> float | None:
        """Used by other programs, on average."""
        cpu = self.readings["host"].get("cpu")
        if cpu is None or cpu.mean is None or self.cores_used is None:
            return None
        return max(0.0, self.cores * cpu.mean / 100 - self.cores_used)

    @property
    def gpu_use(self) -> Life | None:
        """The busiest GPU's utilisation, in percent: of those of the command or, if these are not known, of all."""
        busiest = _busiest(self.readings, self.used or self.models)
        return None if busiest is None else self.readings[busiest][_USE]


def watch(command: Sequence[str], *, windows: bool = False) -> Watched:
    """Run `command` to its end; with `windows`, torch's profiler is switched on in it now and then."""
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"There is no program `{command[0]}` to watch; write: unidle watch -- python train.py.")
    host, driver = Host(), Driver()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started us may ignore it: then no exit status would be kept
    with tempfile.TemporaryDirectory(prefix="unidle-watch-", ignore_cleanup_errors=True) as name:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
        begun_ns = time.perf_counter_ns()
        try:
            try:
                pid = os.posix_spawn(
                    program,
                    list(command),
                    _environment(name, windows),
                    setsigmask=before,
                    setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and others do not
                )
            except OSError as error:
                raise UsageError(f"`{command[0]}` cannot be run: {error.strerror}.") from None
            lives, used, status = _until_the_end(pid, driver.gpus, host, Tree(pid), name)
            ended_ns = time.perf_counter_ns()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            models = {gpu.name: gpu.model for gpu in driver.gpus}
            driver.close()
        return Watched(
            tuple(command),
            status,
            begun_ns,
            ended_ns,
            len(host.cores),
            lives,
            models,
            frozenset(used),
            driver.why_none,
            tuple(read_processes(Path(name))),
        )


def end_as(status: int) -> NoReturn:
    """End this process as the command ended: with its exit status, or by the same signal."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one dump, the command's own, is enough
        with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP have no handler to put back
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)


def _environment(folder: str, windows: bool) -> dict[str, str]:
    paths = [str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "UNIDLE_WATCH": folder}
    if windows:  # and the profiler must not write into the command's output
        found |= {"UNIDLE_WATCH_WINDOWS": "1", "KINETO_LOG_LEVEL": "99"}
    return found


def _until_the_end(
    pid: int, gpus: Sequence[Gpu], host: Host, tree: Tree, folder: str
) -> tuple[dict[str, dict[str, Life]], set[str], int]:
    """Poll everything until the process has ended, and tell its samplers in `folder` how much the GPU is used.

    Returns what was said, which GPUs it used, and its exit status.
    """
    sources: list[Source] = [*gpus, host, tree]
    lives: dict[str, dict[str, Life]] = {source.name: {} for source in sources}
    used: set[str] = set()
    next_host = time.monotonic() + _HOST_EVERY_S / 4
    while True:
        arrived = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, _GPU_EVERY_S if gpus else _HOST_EVERY_S / 4)
        if arrived is not None and arrived.si_signo != signal.SIGCHLD and arrived.si_code != _BY_THE_KERNEL:
            os.kill(pid, arrived.si_signo)
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            return lives, used, os.waitstatus_to_exitcode(how)
        is_due = time.monotonic() >= next_host
        uses: dict[str, list[Sample]] = {}
        for source in [*sources] if is_due else [source for source in sources if source in gpus]:
            try:
                found = source.poll()
            except Exception:  # is no reason to leave the command alone
                sources.remove(source)
                continue
            for reading, samples in found.items():
                if samples:
                    lives[source.name].setdefault(reading, Life()).add(samples)
                    if reading == _USE:
                        uses[source.name] = samples
        busiest = _busiest(lives, used or {gpu.name for gpu in gpus})
        if busiest is not None and busiest in uses:
            with contextlib.suppress(OSError):  # a full disk is no reason to leave the command alone
                tell(folder, [(sample.at_ns, sample.value) for sample in uses[busiest]])
        if is_due:
            next_host = time.monotonic() + _HOST_EVERY_S
            used |= {gpu.name for gpu in gpus if _is_used(gpu, tree)}


def _busiest(readings: Mapping[str, Mapping[str, Life]], gpus: Iterable[str]) -> str | None:
    """The GPU with the highest utilisation so far; None where none tells."""
    telling = (gpu for gpu in gpus if _USE in readings[gpu])
    return max(telling, key=lambda gpu: readings[gpu][_USE].mean or 0.0, default=None)


def _is_used(gpu: Gpu, tree: Tree) -> bool:
    gpu.poll_processes()
    return any(process.pid in tree.pids for process in gpu.processes or ())
