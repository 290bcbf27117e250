"""What was measured of a training job, part by part: all that the pipeline model knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pace:
    """How fast a device is."""

    inference: float
    """Seconds of one service: actions for all environments, copies there and back included."""
    learning: float
    """Seconds of learning from one rollout."""
    collecting: float | None = None
    """Seconds of one rollout by the real collector, where that was tried at this pace."""


@dataclass(frozen=True)
class Stepping:
    """Bare stepping: random actions, no inference, no learning."""

    workers: int
    """Processes; 0: the trainer's own."""
    slices: int
    """Slices of environments that are handed over one by one, in all."""
    seconds: float
    """Of one iteration's steps, each slice going on as soon as it can: the ceiling."""
    in_step: float
    """The same with all environments waiting for each other after each step."""


@dataclass(frozen=True)
class Profile:
    """One training job, by probes. Seconds are of one iteration, unless said otherwise."""

    n_envs: int
    n_steps: int
    overlap: Literal["off", "strict"]
    cores: int
    on_gpu: bool
    """The networks are on a GPU."""
    on_device: bool
    """So are the environments: then only `collecting`, `learning` and `rest` are known."""
    fixed_workers: bool
    """The environments step together as their library does, or on one event loop: workers do not divide them."""
    step_seconds: float
    """Of one environment's step, by itself."""
    on_core: float
    """Of that, the share on a core; the rest is waiting, for a server or a clock."""
    stepping: tuple[Stepping, ...]
    """The first as the job is set, then others."""
    pace: Pace
    """Of the job's device, with its number of threads."""
    collecting: float
    """One rollout by the real collector, nothing learned meanwhile."""
    rest: float
    """What an iteration takes beside collecting and learning."""
    threads: int = 1
    """Of torch, in the training process."""
    learning_by_threads: tuple[tuple[int, float], ...] = ()
    """(threads, seconds of learning) where other numbers of threads were tried."""
    graphs: bool = True
    """CUDA graphs are used where there is a GPU."""
    graphed: Pace | None = None
    """Of the job's device with them, where the job goes without."""
    elsewhere: Pace | None = None
    """Of the other kind of device, the CPU where the job is on a GPU, if there is one."""
    updates: float = 1.0
    """Minibatches, or updates of an off-policy algorithm, that are learned in an iteration."""
    update_overhead: float | None = None
    """Share of an update's time that is the same however large its batch is; None where it was not tried."""

    @property
    def steps(self) -> int:
        """Transitions of one iteration."""
        return self.n_envs * self.n_steps

    @property
    def is_one_piece(self) -> bool:
        """Whole iterations are one piece on the device: what stands under learning is the rollout as well."""
        return self.on_device and self.collecting == 0

    @property
    def waits(self) -> bool:
        """Whether environments wait rather than compute: then more of them in flight take no more cores."""
        return self.on_core < 0.5
