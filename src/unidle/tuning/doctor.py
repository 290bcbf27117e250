"""Checks of the machine and of the installation, for `unidle doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from unidle.config.machine import available_cores, available_memory, cgroup_cores, free_memory
from unidle.meter.sensors.nvml import NO_DRIVER, Driver
from unidle.tuning.extras import Extras, find_extras
from unidle.version import __version__

_SHARED_MEMORY = Path("/dev/shm")
_SMALL_SHARED_MEMORY = 256 * 2**20  # containers get 64 MiB unless they ask for more
_PINNED_BYTES = 64 * 2**20
_LITTLE_DISK = 2**30
_PYTHONS = ((3, 11), (3, 14))  # the first supported version, and the first that is not


@dataclass(frozen=True)
class Check:
    """One finding: ok, a note (it would help), or a problem (training fails, or a GPU stays unused)."""

    name: str
    state: Literal["ok", "note", "problem"]
    value: str
    remedy: str = ""  # what to do; empty: nothing


def examine(runs_dir: Path) -> list[Check]:
    """All checks of this machine, quick ones and those of torch, which take a second or two."""
    driver = Driver()
    try:
        return [
            check_python(sys.version_info[:3]),
            Check("unidle", "ok", __version__),
            *check_torch(driver),
            *check_cores(),
            check_memory(),
            check_shared_memory(_SHARED_MEMORY),
            check_extras(find_extras()),
            check_folder(runs_dir),
        ]
    finally:
        driver.close()


def check_python(version: tuple[int, ...]) -> Check:
    """The version of Python."""
    text = ".".join(map(str, version))
    first, end = _PYTHONS
    if first <= version[:2] < end:
        return Check("Python", "ok", text)
    return Check("Python", "problem", text, "use Python 3.11, 3.12 or 3.13.")


# -- torch and the GPU -----------------------------------------------------------------------------------------------


def check_torch(driver: Driver) -> list[Check]:
    """torch, the driver and the GPUs, and whether torch can use them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [Check("torch", "problem", f"cannot be imported ({reason})", "install it again: pip install torch.")]
    cuda, models = torch.version.cuda, [gpu.model for gpu in driver.gpus]
    checks = [
        Check("torch", "ok", str(torch.__version__)),
        check_driver(driver.no_gpu_reason, driver.version, driver.cuda),
        check_cuda(cuda, driver.cuda if models else None),
    ]
    pinning = None
    if not models:
        checks.append(Check("GPU", "ok", "none; training runs on the CPU"))
    elif cuda is not None:
        failure = _failure_of(lambda: float(torch.ones(8, device="cuda").pow(2).sum()))
        checks.append(check_gpus(models, failure))
        pinning = failure or _failure_of(lambda: torch.ones(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True))
    checks.append(check_triton(_triton_version(), shutil.which(os.environ.get("CC") or "cc"), bool(models)))
    return [*checks, check_lock_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pinning)]


def check_driver(no_gpu_reason: str | None, version: str | None, cuda: tuple[int, int] | None) -> Check:
    """The NVIDIA driver."""
    if no_gpu_reason is None:
        newest = "" if cuda is None else f", for CUDA up to {cuda[0]}.{cuda[1]}"
        return Check("driver", "ok", (version or "unknown version") + newest)
    value = no_gpu_reason.removesuffix(".")
    if no_gpu_reason == NO_DRIVER:
        return Check("driver", "ok", value)
    remedy = "pass the GPU to this container or job (--gpus all, --gres gpu:1), or load the driver again."
    return Check("driver", "problem", value, remedy)


def check_cuda(cuda: str | None, newest: tuple[int, int] | None) -> Check:
    """Torch's version of CUDA, against the newest that the driver of the GPU supports; None without a GPU."""
    if cuda is None:
        value = "not in this build of torch, which is for CPUs"
        if newest is None:
            return Check("CUDA", "ok", value)
        return Check("CUDA", "problem", value, "install a build of torch for CUDA, or the GPU stays unused.")
    if newest is not None and newest[0] < int(cuda.partition(".")[0]):
        remedy = f"update the driver, or install a build of torch for CUDA {newest[0]}."
        return Check("CUDA", "problem", f"{cuda}, newer than the driver supports", remedy)
    return Check("CUDA", "ok", cuda)


def check_gpus(models: Sequence[str], failure: str | None) -> Check:
    """The GPUs, and why torch cannot compute on them, if it cannot."""
    names = ", ".join(f"{models.count(model)} × {model}" for model in dict.fromkeys(models))
    if failure is None:
        return Check("GPU", "ok", names)
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return Check("GPU", "note", f"{names}, hidden by CUDA_VISIBLE_DEVICES", "unset it to train on the GPU.")
    return Check("GPU", "problem", f"{names}, but torch cannot use it ({failure})", "make torch and driver match.")


def _failure_of(trial: Callable[[], Any]) -> str | None:
    """The first line of the error that `trial` raises; None if it succeeds."""
    try:
        trial()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].removesuffix(".")
    return None


def check_lock_limit(limit: int, failure: str | None) -> Check:
    """The limit on locked memory, and why memory cannot be pinned for copies to the GPU, if it cannot."""
    value = "unlimited" if limit == resource.RLIM_INFINITY else f"up to {_size(limit)}"
    if failure is None:
        return Check("locked memory", "ok", value)
    remedy = "raise the limit (ulimit -l unlimited, --ulimit memlock=-1); copies to the GPU are slower without it."
    return Check("locked memory", "note", f"{value}, and memory cannot be pinned ({failure})", remedy)


def check_triton(version: str | None, compiler: str | None, has_gpu: bool) -> Check:
    """Triton, which the fast kernels on a GPU need, and the C compiler that Triton needs."""
    if not has_gpu:
        return Check("Triton", "ok", version or "not installed; only a GPU needs it")
    if version is None:
        return Check(
            "Triton", "note", "not installed, so kernels are PyTorch's, and slower", "run: pip install triton."
        )
    if compiler is None:
        remedy = "install gcc, or set CC; without it, kernels are PyTorch's, and slower."
        return Check("Triton", "note", f"{version}, without a C compiler", remedy)
    return Check("Triton", "ok", version)


def _triton_version() -> str | None:
    if find_spec("triton") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown version"


# -- the machine -----------------------------------------------------------------------------------------------------


def check_cores() -> list[Check]:
    """Cores by affinity mask and cgroup, and those that unidle uses."""
    every, affinity, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cgroup_cores()
    usable = available_cores()
    limits = f"{affinity} by affinity, {'no limit' if quota is None else f'{quota:g}'} by cgroup"
    value = f"{usable} of {every} ({limits}), {platform.machine()}"
    if usable == 1:
        return [Check("cores", "note", value, "give the container or job more: workers and training share this one.")]
    return [Check("cores", "ok", value)]


def check_memory() -> Check:
    """Memory that this process may use."""
    free, every = free_memory(), available_memory()
    value = f"{_size(free)} of {_size(every)} free"
    if free < 2**30:
        return Check("memory", "note", value, "stop other programs; a run of a small network needs about 1 GiB.")
    return Check("memory", "ok", value)


def check_shared_memory(folder: Path) -> Check:
    """/dev/shm, which unidle's own workers do not need."""
    if not folder.is_dir():
        return Check(str(folder), "note", "missing", "mount it if an environment or another library needs it.")
    usage = shutil.disk_usage(folder)
    value = f"{_size(usage.free)} of {_size(usage.total)} free"
    if usage.free < _SMALL_SHARED_MEMORY:
        remedy = "unidle's workers do not use it; for libraries that do, start the container with --shm-size=1g."
        return Check(str(folder), "note", value, remedy)
    return Check(str(folder), "ok", value)


def check_extras(extras: Extras | None) -> Check:
    """The optional packages that are installed."""
    if extras is None:
        return Check("extras", "note", "unknown, because unidle itself is not installed", "run: pip install .")
    value = ", ".join(extras.complete) or "none"
    if not extras.missing:
        return Check("extras", "ok", value)
    missing = ", ".join(f"{name} ({', '.join(packages)})" for name, packages in extras.missing.items())
    remedy = f"pip install 'unidle[{next(iter(extras.missing))}]' adds the first of them; this unidle stays as it is."
    return Check("extras", "ok", f"{value}; without {missing}", remedy)


def check_folder(runs_dir: Path) -> Check:
    """Whether a run can be written below `runs_dir`, which need not exist yet."""
    folder = runs_dir.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    remedy = "make it writable, or choose another --runs-dir."
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("runs folder", "problem", f"{runs_dir} cannot be written ({error.strerror})", remedy)
    value = f"{runs_dir}, writable, {_size(free)} free"
    if free < _LITTLE_DISK:
        return Check("runs folder", "note", value, "free some disk space; checkpoints and metrics are written there.")
    return Check("runs folder", "ok", value)


def _size(nbytes: int) -> str:
    """Bytes with a unit: 64 KiB, 8 MiB, 23.5 GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"
