"""The measured profile of a training job, the input of the pipeline model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pace:
    """Speed of inference and learning on a device."""

    inference: float
    """Seconds of one inference call for all environments, copies included."""
    learning: float
    """Seconds of learning from one rollout."""
    collecting: float | None = None
    """Seconds of one rollout with the real collector, if measured."""


@dataclass(frozen=True)
class Stepping:
    """Bare stepping: random actions, no inference, no learning."""

    workers: int
    """Worker processes; 0: the trainer's own process."""
    slices: int
    """Slices of all workers together."""
    seconds: float
    """Seconds per iteration if each slice continues as soon as it can: the upper limit."""
    lockstep_seconds: float
    """Seconds per iteration if all environments wait for each other after each step."""


@dataclass(frozen=True)
class SimulatorPace:
    """Speed of a simulator on the device, which runs its own Python in each step; seconds are of one step of all."""

    step: float
    larger: tuple[int, float] | None = None
    """The same with more environments: their number, and the seconds of a step; None if it could not be measured."""
    takes_n_envs: bool = True
    """Whether --n-envs sets the number of environments; otherwise a user's factory does."""

    def overhead(self, n_envs: int) -> float | None:
        """Share of a step of `n_envs` that does not depend on their number, by a line through two numbers."""
        if self.larger is None:
            return None
        per_size = (self.larger[1] - self.step) / (self.larger[0] / n_envs - 1)
        return min(1.0, max(0.0, 1 - per_size / self.step))


@dataclass(frozen=True)
class Profile:
    """Probe measurements of one training job; seconds are per iteration unless noted."""

    n_envs: int
    n_steps: int
    overlap: Literal["off", "strict"]
    cores: int
    on_gpu: bool
    """Whether the networks are on a GPU."""
    on_device: bool
    """Whether the environments are on the device; then only `collecting`, `learning` and `rest` are known."""
    fixed_workers: bool
    """Whether a library or an event loop steps all environments together, so workers cannot divide them."""
    step_seconds: float
    """Seconds of a single environment step."""
    on_core: float
    """Share of that on a core; the rest is waiting for I/O or a timer."""
    stepping: tuple[Stepping, ...]
    """The job's own setting first, then others."""
    pace: Pace
    """Pace on the job's device with its number of threads."""
    collecting: float
    """One rollout with the real collector, without learning."""
    rest: float
    """Time outside collecting and learning."""
    threads: int = 1
    """torch threads of the training process."""
    learning_by_threads: tuple[tuple[int, float], ...] = ()
    """(threads, seconds of learning) for other numbers of threads."""
    graphs: bool = True
    """Whether CUDA graphs are used on a GPU."""
    graphed: Pace | None = None
    """Pace with CUDA graphs, if the job does not use them."""
    other_device: Pace | None = None
    """Pace on the other device: the CPU if the job is on a GPU, and vice versa."""
    updates: float = 1.0
    """Minibatch updates per iteration."""
    update_overhead: float | None = None
    """Share of an update that does not depend on the batch size; None if not measured."""
    simulator: SimulatorPace | None = None
    """The environments, if they are a simulator on the device whose step cannot be captured."""

    @property
    def steps(self) -> int:
        """Transitions per iteration."""
        return self.n_envs * self.n_steps

    @property
    def is_single_graph(self) -> bool:
        """Whether an iteration is a single graph on the device, so that `learning` includes the rollout."""
        return self.on_device and self.collecting == 0

    @property
    def waits(self) -> bool:
        """Whether environments mostly wait, so that more of them need no more cores."""
        return self.on_core < 0.5
