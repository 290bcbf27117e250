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

_Pointer, _Integer = ctypes.c_void_p, ctypes.c_int64


class _Bell(ctypes.Structure):
    _fields_ = tuple((name, _Pointer) for name in ("asleep", "semaphore"))


class _Slot(ctypes.Structure):
    _fields_ = tuple((name, _Pointer) for name in ("positions", "outcomes", "actions", "staged", "graph"))


class _Lane(ctypes.Structure):
    _fields_ = (
        *((name, _Integer) for name in ("n_slices", "n_envs", "n_steps", "width", "at_least", "stall_ns")),
        *((name, _Pointer) for name in ("bounds", "flags")),
        ("flag_stride", _Integer),
        *((name, _Pointer) for name in ("bells", "step", "slot", "outcomes", "actions", "slots")),
        *((name, _Pointer) for name in ("driver", "stream", "event")),
        *((name, _Pointer) for name in ("ready", "intervals")),
        *((name, _Integer) for name in ("capacity", "first_slot", "state", "error", "n_ready", "n_intervals")),
        *((name, _Integer) for name in ("n_acts", "inference_ns", "since", "launched", "was_split")),
    )


class Driver(ctypes.Structure):
    """The addresses of cuGraphLaunch, cuEventRecord and cuEventQuery."""

    _fields_ = tuple((name, _Pointer) for name in ("launch", "record", "query"))


class _Waiting(ctypes.Structure):
    _fields_ = (("asleep", _Pointer), ("semaphore", _Pointer), ("spin", _Integer), ("yields_core", _Integer))


@dataclass(frozen=True)
class Waiting:
    """How the trainer waits for environments."""

    ready: WakeUp
    spin_seconds: float
    yields_core: bool

    def for_c(self) -> _Waiting:
        """The same as a structure."""
        return _Waiting(self.ready.asleep, self.ready.semaphore, int(self.spin_seconds * _NS), self.yields_core)


@dataclass(frozen=True)
class Launcher:
    """Where captured inference runs: a stream, an event on it, and the functions that know them."""

    driver: Driver
    stream: int
    event: int
    kept: Any = None  # what these belong to

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
    compiler = shlex.split(os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "")
    if not compiler:
        return "no C compiler (cc) was found"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidle"
    source = _SOURCE.read_bytes()
    target = cache / f"step_loop-{hashlib.sha256(source).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                built = Path(folder) / target.name
                command = [*compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(built), str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                built.replace(target)
        if target.stat().st_uid != os.getuid():
            return f"{target} belongs to another user"
        loaded = ctypes.CDLL(str(target))  # releases the GIL
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).splitlines()
        return f"its loop in C could not be compiled: {next((line for line in said if 'error' in line), str(error))}"
    loaded.unidle_step.argtypes = [_Pointer, _Integer, _Integer, _Integer, _Pointer]
    loaded.unidle_step.restype = None
    return loaded


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
        bells = (_Bell * n_slices)(*(_Bell(*wake_up) for wake_up in envs.wake_ups()))
        own = (_Slot * len(slots))(*(_slot(slot, graph) for slot, graph in zip(slots, graphs)))
        self._kept = (envs, schedule, slots, launcher, bounds, ready, bells, own)  # pointers lead into these
        self._lane = _Lane(
            n_slices=n_slices,
            n_envs=n_envs,
            n_steps=n_steps,
            width=block.actions.shape[1],
            at_least=at_least,
            stall_ns=int(stall_seconds * _NS),
            bounds=bounds.ctypes.data,
            flags=envs.flags.ctypes.data,
            flag_stride=envs.flags.strides[0],
            bells=ctypes.addressof(bells),
            step=schedule.step.ctypes.data,
            slot=schedule.slots.ctypes.data,
            outcomes=block.step_words.ctypes.data,
            actions=block.actions.ctypes.data,
            slots=ctypes.addressof(own),
            driver=ctypes.addressof(launcher.driver),
            stream=launcher.stream,
            event=launcher.event,
            ready=ready.ctypes.data,
            intervals=self._intervals.ctypes.data,
            state=_NEEDS_PYTHON,
        )
        self._alone = (_Pointer * 1)(self.pointer)
        self._waiting = Waiting(envs.ready, SPIN_SECONDS, envs.yields_core)

    @property
    def pointer(self) -> int:
        """For `step_all`."""
        return ctypes.addressof(self._lane)

    # -- one turn ------------------------------------------------------------------------------------------------------

    def begin(self, oldest_slot: int, sent_ns: int, *, records: bool) -> None:
        """Hand the environments over to `run` or `step_all`, until `end`; Python last sent actions at `sent_ns`.

        `records`: each inference, not only how long all of them took.
        """
        lane = self._lane
        lane.capacity = _INTERVALS if records else 0
        lane.first_slot, lane.was_split, lane.n_acts, lane.n_intervals, lane.inference_ns = oldest_slot, 0, 0, 0, 0
        lane.since, lane.state = max(lane.since, sent_ns), _STEPPING

    def run(self, seconds: float) -> None:
        """Step for about so long, or until Python is needed; afterwards no inference is under way."""
        self._step(self._alone, 1, int(seconds * _NS), 1, ctypes.byref(self._waiting.for_c()))

    @property
    def needs_python(self) -> bool:
        """Whether the next step is one that Python has to handle."""
        return bool(self._lane.state == _NEEDS_PYTHON)

    @property
    def is_acting(self) -> bool:
        """Whether inference is under way: then its slices are not Python's to touch."""
        return bool(self._lane.state == _ACTING)

    def end(self) -> LoopTimes:
        """Take the environments back. RuntimeError if CUDA reported an error."""
        lane = self._lane
        if lane.error:
            raise RuntimeError(f"CUDA error {lane.error} while actions were inferred")
        lane.state = _NEEDS_PYTHON
        return LoopTimes(lane.n_acts, lane.inference_ns, self._intervals[: lane.n_intervals].tolist())


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
    pointers, waits = (_Pointer * len(loops))(*(loop.pointer for loop in loops)), waiting.for_c()
    loops[0]._step(pointers, len(loops), int(seconds * _NS), 0, ctypes.byref(waits))


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
    if any(type(module).__module__.partition(".")[0] not in ("unidle", "torch") for module in policy.modules()):
        return "the network may draw random numbers"  # which a graph that torch does not replay would repeat
    if any(isinstance(module, torch.nn.modules.dropout._DropoutNd) for module in policy.modules()):
        return "the network has dropout"
    compiled = library()
    if isinstance(compiled, str):
        capture.fall_back("Collecting", RuntimeError(compiled), "runs in Python")
        return compiled
    return None
