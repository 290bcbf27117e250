"""Where and how a run computes: device, precision, worker processes, slices.

Of these, only the precision changes what is learned.
"""

from __future__ import annotations

import torch

from unidle.config import Engine, Recipe
from unidle.config.machine import available_cores
from unidle.engine.collect.host import QUICK_SECONDS
from unidle.engine.other_trainers import CoreShare
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError

# A round trip to a worker takes about this long: work that takes less is faster in this process.
_POOL_OVERHEAD_SECONDS = 150e-6


def choose_device(name: str) -> torch.device:
    """The requested device; `auto` is the GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not has_gpu:
        raise UsageError(f"--device {name}: torch finds no CUDA GPU on this machine; use --device cpu or auto.")
    index = int(name.partition(":")[2] or 0)
    if has_gpu and index >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, counted from 0.")
    return torch.device("cuda" if name == "auto" and has_gpu else "cpu" if name == "auto" else name)


def set_numerics(device: torch.device, recipe: Recipe) -> str:
    """Set matmul precision and deterministic kernels for this process; returns the name of the precision."""
    torch.backends.cudnn.benchmark = False  # it chooses kernels by timing, which differs from run to run
    torch.backends.cudnn.deterministic = True
    if device.type == "cpu":
        return "fp32"
    if device.index is not None:
        torch.cuda.set_device(device)  # for what is allocated or launched on the current device
    torch.set_float32_matmul_precision("highest" if recipe.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = recipe.precision != "fp32"
    return recipe.precision


def choose_workers(engine: Engine, n_envs: int, step_seconds: float, *, is_busy: bool, cores: int | None = None) -> int:
    """Number of worker processes; 0: environments are stepped in this process.

    `is_busy`: this process needs its own core, and a worker on it would slow down both. `cores` defaults to those
    of this machine.
    """
    cores = cores or available_cores()
    if engine.subproc is False:
        return 0
    workers = min(n_envs, engine.workers or max(1, cores - is_busy))
    if engine.workers is None and workers < n_envs < 2 * workers:
        # Some workers would have two environments and others one. With two each, a step takes no longer, and a worker
        # can step one of them while the other waits for its action.
        workers = -(-n_envs // 2)
    saved = n_envs * step_seconds * (1 - 1 / min(cores, workers + is_busy))
    return workers if engine.subproc or engine.workers or saved > _POOL_OVERHEAD_SECONDS else 0


def fewer_workers(share: CoreShare, workers: int, alone: int) -> str:
    """A message: because of other trainers, there are fewer worker processes than this run would start alone."""
    others = f"{share.others} other unidle trainer{'s' * (share.others > 1)}"
    chosen = f"{workers} worker process{'es' * (workers > 1)}" if workers else "no worker processes"
    return f"Found {others} on these {share.total} cores: {chosen} instead of {alone}; --workers sets another number."


def choose_slices(engine: Engine, n_envs: int, workers: int, step_seconds: float, device: torch.device) -> int:
    """Slices per worker: two, or one if a CPU infers for all environments together because they step so fast."""
    quick = device.type == "cpu" and step_seconds * n_envs / max(1, 2 * workers) < QUICK_SECONDS
    return engine.slices or (1 if quick else 2)


def choose_vector_envs(
    maker: EnvMaker, engine: Engine, n_envs: int, step_seconds: float, device: torch.device, *, overlap: bool
) -> tuple[int, int]:
    """How many vector environments to create, and in how many processes of their own to step them; 0: in this one.

    A factory returns one. Of a native library two by default, so that one steps while the other waits for its actions;
    the environments have the same seeds in any number of them.
    """
    if engine.workers is not None and engine.slices not in (None, engine.workers):
        raise UsageError(
            f"--workers and --slices both say into how many parts a vector environment is split, and are "
            f"{engine.workers} and {engine.slices}; remove one of them."
        )
    count = engine.workers or choose_slices(engine, n_envs, 0, step_seconds, device)
    count = 1 if maker.native is None else min(count, n_envs)
    asked = engine.subproc or engine.workers is not None
    return count, count if asked or (overlap and engine.subproc is not False) else 0


def too_many_workers(engine: Engine) -> str | None:
    """A warning if there are more worker processes than cores."""
    cores = available_cores()
    if engine.workers is not None and engine.workers > cores:
        return f"{engine.workers} worker processes share {cores} cores and slow each other down; use --workers {cores}."
    return None
