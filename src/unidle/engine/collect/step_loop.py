"""The loop of collecting in C, for worker processes and a GPU: step_loop.c, compiled when it is first used.

With few environments, a step takes as long as the Python around it. Nearly all steps are alike: slices of environments
have stepped, their outcomes are copied to the staging memory, inference is launched, and the actions are sent. That is
what the C code does, and only that. Whenever anything else is due, it changes nothing and returns to Python, which
handles this step like any other (host.py): the last step of a rollout or an episode, a fault, an error.

It acts for the same slices with the same graphs, so results are the same bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from unidle.algos.capturing import Capturer
from unidle.algos.registry import AnyPolicy
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.overlap import SliceSchedule
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.signals import WakeUp
from unidle.envs.pool.worker import SPIN_SECONDS
from unidle.envs.protocol import HostEnvs

_SOURCE = Path(__file__).with_name("step_loop.c")
_STEPPING, _ACTING, _NEEDS_PYTHON = range(3)
_INTERVALS = 4096  # recorded between two returns to Python; later ones are not recorded
_NS = 1e9

# Layers of torch without random numbers.
_LAYERS = frozenset(
    [
        *("AvgPool2d", "Conv1d", "Conv2d", "ELU", "Embedding", "EmbeddingBag", "Flatten", "GELU", "GroupNorm"),
        *("Identity", "LayerNorm", "LeakyReLU", "Linear", "MaxPool2d", "Mish", "ModuleDict", "ModuleList"),
        *("ParameterDict", "ParameterList", "ReLU", "Sequential", "SiLU", "Softplus", "Tanh"),
    ]
)

_Pointer, _Integer = ctypes.c_void_p, ctypes.c_int64


class _WakeUp(ctypes.Structure):
    _fields_ = tuple((name, _Pointer) for name in ("asleep", "semaphore"))


class _Slot(ctypes.Structure):
    _fields_ = tuple((name, _Pointer) for name in ("positions", "outcomes", "actions", "staged", "graph"))


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, _Integer) for name in ("n_slices", "n_envs", "n_steps", "width", "at_least", "stall_ns")),
        *((name, _Pointer) for name in ("bounds", "flags")),
        ("flag_stride", _Integer),
        *((name, _Pointer) for name in ("wake_ups", "step", "slot", "outcomes", "actions", "slots")),
        *((name, _Pointer) for name in ("driver", "stream", "event")),
        *((name, _Pointer) for name in ("ready", "intervals")),
        *((name, _Integer) for name in ("capacity", "first_slot", "state", "error", "n_ready", "n_intervals")),
        *((name, _Integer) for name in ("n_acts", "inference_ns", "since", "launched", "was_split")),
    )


class Driver(ctypes.Structure):
    """The addresses of cuGraphLaunch, cuEventRecord and cuEventQuery."""

    _fields_ = tuple((name, _Pointer) for name in ("launch", "record", "query"))


class Waiting(ctypes.Structure):
    """How the trainer waits for environments: see `Doorbell.wait`."""

    _fields_ = (
        *((name, _Pointer) for name in ("asleep", "semaphore")),
        *((name, _Integer) for name in ("spin", "yields_core", "progressed_at")),
    )

    @staticmethod
    def on(ready: WakeUp, spin_seconds: float, *, yields_core: bool) -> Waiting:
        """On a doorbell that the workers ring."""
        return Waiting(ready.asleep, ready.semaphore, int(spin_seconds * _NS), yields_core, 0)


@dataclass(frozen=True)
class Launcher:
    """Where captured inference runs: a stream, an event on it, and the functions that know them."""

    driver: Driver
    stream: int
    event: int
    owners: Any = None  # of these

    @staticmethod
    def cuda(stream: torch.cuda.Stream) -> Launcher:
        """On a CUDA stream, with the driver's functions."""
        cuda, event = ctypes.CDLL("libcuda.so.1"), torch.cuda.Event()
        event.record(stream)  # creates it
        functions = (cuda.cuGraphLaunch, cuda.cuEventRecord, cuda.cuEventQuery)
        driver = Driver(*(ctypes.cast(function, _Pointer) for function in functions))
        return Launcher(driver, stream.cuda_stream, event.cuda_event, (cuda, event, stream))


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled loop, or the reason why there is none."""
    try:
        compiler = shlex.split(os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "")
        if not compiler:
            return "no C compiler (cc) was found"
        try:
            loaded = _load_cached(compiler)
        except (OSError, RuntimeError):  # no home folder, one that cannot be written, or a file that cannot be loaded
            with tempfile.TemporaryDirectory() as folder:
                loaded = ctypes.CDLL(str(_compile(compiler, Path(folder) / "step_loop.so")))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        stderr = (getattr(error, "stderr", None) or str(error)).splitlines()
        return f"its loop in C could not be compiled: {next((line for line in stderr if 'error' in line), str(error))}"
    loaded.unidle_step.argtypes = [_Pointer, _Integer, _Integer, _Integer, _Pointer]
    loaded.unidle_step.restype = None
    loaded.unidle_run_bytes.restype = _Integer
    assert loaded.unidle_run_bytes() == ctypes.sizeof(_Run)
    return loaded


def _load_cached(compiler: list[str]) -> ctypes.CDLL:
    """Load it from the user's cache, where it is compiled first if there is none for this source and machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidle"
    machine = " ".join((platform.machine(), *platform.libc_ver()))  # a home folder may be that of several machines
    key = hashlib.sha256(_SOURCE.read_bytes() + machine.encode()).hexdigest()[:16]
    target = cache / f"step_loop-{key}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _compile(compiler, Path(folder) / target.name).replace(target)
    if target.stat().st_uid != os.getuid():
        raise OSError(f"{target} belongs to another user")
    return ctypes.CDLL(str(target))  # calls release the GIL


def _compile(compiler: list[str], target: Path) -> Path:
    command = [*compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(target), str(_SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


class StepLoop:
    """The C loop's view of one collector."""

    def __init__(
        self,
        envs: ProcessPool,
        schedule: SliceSchedule,
        slots: Sequence[RolloutSlot],
        graphs: Sequence[int | None],
        launcher: Launcher,
        at_least: int,
        stall_seconds: float,
    ) -> None:
        """`graphs` [slot] infer for each slot's positions; for other arguments see `HostCollector`."""
        compiled = library()
        assert not isinstance(compiled, str), compiled
        self._step, block = compiled.unidle_step, envs.block
        n_slices, (n_steps, n_envs) = len(envs.bounds), slots[0].rollout.shape
        bounds, ready = np.array(envs.bounds, np.int64), np.zeros(n_slices, np.int64)
        self._intervals = np.zeros((_INTERVALS, 2), np.int64)
        wake_ups = (_WakeUp * n_slices)(*(_WakeUp(*wake_up) for wake_up in envs.wake_ups()))
        c_slots = (_Slot * len(slots))(*(_slot(slot, graph) for slot, graph in zip(slots, graphs)))
        self._schedule, self._n_slots = schedule, len(slots)
        self._steps, self._slot_of = np.zeros(n_slices, np.int64), np.zeros(n_slices, np.int64)  # [slice]
        self._keep_alive = (envs, slots, launcher, bounds, ready, wake_ups, c_slots)  # pointers lead into these
        self._c_run = _Run(
            n_slices=n_slices,
            n_envs=n_envs,
            n_steps=n_steps,
            width=block.actions.shape[1],
            at_least=at_least,
            stall_ns=int(stall_seconds * _NS),
            bounds=bounds.ctypes.data,
            flags=envs.flags.ctypes.data,
            flag_stride=envs.flags.strides[0],
            wake_ups=ctypes.addressof(wake_ups),
            step=self._steps.ctypes.data,
            slot=self._slot_of.ctypes.data,
            outcomes=block.step_words.ctypes.data,
            actions=block.actions.ctypes.data,
            slots=ctypes.addressof(c_slots),
            driver=ctypes.addressof(launcher.driver),
            stream=launcher.stream,
            event=launcher.event,
            ready=ready.ctypes.data,
            intervals=self._intervals.ctypes.data,
            state=_NEEDS_PYTHON,
        )
        self._alone = (_Pointer * 1)(self.pointer)
        self._waiting = Waiting.on(envs.ready, SPIN_SECONDS, yields_core=envs.yields_core)

    @property
    def pointer(self) -> int:
        """For `step_all`."""
        return ctypes.addressof(self._c_run)

    # -- one turn ------------------------------------------------------------------------------------------------------

    def begin(self, sent_ns: int, *, records: bool) -> None:
        """Hand the environments over to `run` or `step_all`, until `end`; Python last sent actions at `sent_ns`.

        `records`: each inference, not only how long all of them took.
        """
        run, schedule = self._c_run, self._schedule
        self._steps[:] = schedule.step
        if self._n_slots > 1:
            self._slot_of[:] = [rollout % self._n_slots for rollout in schedule.rollout]
        run.capacity = _INTERVALS if records else 0
        run.first_slot, run.was_split = schedule.oldest % self._n_slots, 0
        run.n_acts = run.n_intervals = run.inference_ns = 0
        run.since = max(run.since, sent_ns)
        self._waiting.progressed_at = run.since  # so that it does not sleep at once after a long update
        run.state = _STEPPING

    def run(self, seconds: float) -> None:
        """Step for about so long, or until Python is needed; afterwards no inference is under way."""
        self._step(self._alone, 1, int(seconds * _NS), 1, ctypes.byref(self._waiting))

    @property
    def needs_python(self) -> bool:
        """Whether the next step is one that Python has to handle."""
        return bool(self._c_run.state == _NEEDS_PYTHON)

    @property
    def is_acting(self) -> bool:
        """Whether inference is under way: then its slices are not Python's to touch."""
        return bool(self._c_run.state == _ACTING)

    def end(self) -> LoopTimes:
        """Take the environments back. RuntimeError if CUDA reported an error."""
        run = self._c_run
        if run.error:
            raise RuntimeError(f"CUDA error {run.error} while actions were inferred")
        run.state = _NEEDS_PYTHON
        self._schedule.step[:] = self._steps.tolist()
        return LoopTimes(run.n_acts, run.inference_ns, self._intervals[: run.n_intervals].tolist())


@dataclass(frozen=True)
class Steps:
    """What a run of a group yields while the loop steps its environments: `step_all` has to be called."""

    loop: StepLoop
    until: float  # of time.monotonic

    def __call__(self) -> bool:
        """Whether the run can continue."""
        return self.loop.needs_python or (time.monotonic() >= self.until and not self.loop.is_acting)


class LoopTimes(NamedTuple):
    """What the loop did between `begin` and `end`."""

    n_acts: int
    inference_ns: int
    intervals: list[tuple[int, int]]  # of recorded inferences, from launch to sent actions


def step_all(loops: Sequence[StepLoop], seconds: float, waiting: Waiting) -> None:
    """Step the environments of several collectors for about so long, or until one of them needs Python.

    Inference may then be under way.
    """
    pointers = (_Pointer * len(loops))(*(loop.pointer for loop in loops))
    loops[0]._step(pointers, len(loops), int(seconds * _NS), 0, ctypes.byref(waiting))


def _slot(slot: RolloutSlot, graph: int | None) -> _Slot:
    staging, inference = slot.staging, slot.inference
    return _Slot(
        inference.positions.ctypes.data,
        staging.outcomes.ctypes.data,
        staging.actions.ctypes.data,
        None if inference.staged is None else inference.staged.ctypes.data,
        graph,
    )


def loop_unsupported(envs: HostEnvs, policy: AnyPolicy, capture: Capturer, *, on_gpu: bool) -> str | None:
    """Why these environments are stepped in Python alone; None if they need not be. Reports a missing compiler."""
    if not on_gpu:
        return "the policy acts on the CPU"
    if not isinstance(envs, ProcessPool):
        return "the environments are not in worker processes"
    if policy.state_size:
        return "the policy is recurrent"
    if not all(map(_draws_nothing, policy.modules())):
        return "the network may draw random numbers"  # a graph that torch does not replay would repeat them
    reason = library()
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        reason = f"torch {torch.__version__} does not give access to captured graphs"
    if isinstance(reason, str):
        runs_in_python(capture, reason)
        return reason
    return None


def runs_in_python(capture: Capturer, reason: str) -> None:
    """Say so."""
    capture.fall_back("Collecting", RuntimeError(reason), "runs in Python")


def _draws_nothing(module: torch.nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("unidle.") or (
        kind.__name__ in _LAYERS and kind is getattr(torch.nn, kind.__name__)
    )
