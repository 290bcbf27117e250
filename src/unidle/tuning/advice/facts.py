"""All that is known of a training job when advice is to be given: settings, probes, a short real run, readings."""

from __future__ import annotations

from dataclasses import dataclass, field

from unidle.config import Config
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes.profile import Profile
from unidle.tuning.probes.stepping import Steps

ON_DEVICE = "iterations on the device"  # where stepping and learning are one piece, and cannot be told apart
_DOUBTFUL = 1.3  # an iteration may take so much longer or shorter than its parts say


@dataclass(frozen=True)
class Table:
    """Where the time of the real run went; shares that sum to 1."""

    of_gpu: bool
    """Of the GPU's time, by what it waited for; else of the trainer's thread, by phase."""
    busy: float
    """The GPU computed; 0 in the table of a thread."""
    idle: dict[str, float]
    """By cause, or by phase."""
    unattributed: float

    def share(self, *causes: str) -> float:
        """What these take together."""
        return sum(self.idle.get(cause, 0.0) for cause in causes)


@dataclass(frozen=True)
class Readings:
    """Of GPU and host during the real run; None where the machine does not tell."""

    cores_used: float | None = None
    """By the run and its workers."""
    others_cores: float | None = None
    """By other programs, of the cores that this one may use."""
    gpu_memory: float | None = None
    """The highest share of the GPU's memory that was in use."""
    host_memory: float | None = None
    """The highest share of the memory that this process may use."""
    throttled: dict[str, float] = field(default_factory=dict)
    """Reason → share of the looks at which the GPU was slowed down by it."""
    learning_busy: float | None = None
    """Share of learning in which kernels ran."""


@dataclass(frozen=True)
class Facts:
    """A training job, measured."""

    config: Config
    profile: Profile
    seconds: float
    """Of one iteration in the real run."""
    table: Table
    readings: Readings = Readings()
    steps: Steps | None = None
    """Of one environment by itself."""
    requests: bool = False
    """The environments ask a server."""
    request_counts: dict[str, int] = field(default_factory=dict)
    """What became of the real run's requests, by kind."""
    to_device: float | None = None
    """Bytes a second from host to GPU."""
    from_device: float | None = None
    sent_bytes: int = 0
    """Of observations, to the GPU, for each inference."""
    replay_on_host: bool = False
    learning_with_memory_on_gpu: float | None = None
    """Seconds of learning from one rollout if what is remembered lay on the GPU, where it does not."""
    learning_in_tf32: float | None = None
    """The same with products in TF32, where they are in fp32."""
    slower_ways: tuple[str, ...] = ()
    """What the engine said that it does in a slower way than it could, and why."""

    @property
    def steps_per_second(self) -> float:
        """Of the real run."""
        return self.profile.steps / self.seconds

    @property
    def learning(self) -> float:
        """Share of an iteration that passes only because something is learned."""
        profile = self.profile
        hidden = profile.collecting if profile.overlap == "strict" else 0.0
        return min(1.0, max(0.0, profile.pace.learning - hidden) / self.whole)

    @property
    def shares(self) -> dict[str, float]:
        """What an iteration consists of, as far as it can be told apart."""
        if self.profile.is_one_piece:
            return {ON_DEVICE: self.learning}
        return {"stepping": self.stepping, "inference": self.serving, "learning": self.learning}

    @property
    def stepping(self) -> float:
        """Share of an iteration in which environments step and nothing else goes on."""
        profile = self.profile
        if profile.on_device:
            return min(1.0, profile.collecting / self.whole)
        hidden = profile.pace.learning if profile.overlap == "strict" else 0.0
        return min(1.0, max(0.0, min(profile.stepping[0].seconds, profile.collecting) - hidden) / self.whole)

    @property
    def serving(self) -> float:
        """Share of an iteration in which collecting takes longer than bare stepping: inference and hand-overs."""
        profile = self.profile
        if profile.on_device:
            return 0.0
        hidden = profile.pace.learning if profile.overlap == "strict" else 0.0
        alone = max(0.0, profile.collecting - max(hidden, profile.stepping[0].seconds))
        return min(1.0, alone / self.whole)

    @property
    def copying(self) -> float:
        """Of `serving`, the part in which observations are on their way to the GPU."""
        inference = self.profile.pace.inference
        if not self.to_device or not inference:
            return 0.0
        return self.serving * min(1.0, self.sent_bytes / self.to_device / inference)

    @property
    def launching(self) -> float:
        """Of `serving`, the part in which kernels are launched one by one that a graph would launch at once."""
        graphed = self.profile.graphed
        if graphed is None or graphed.collecting is None:
            return 0.0
        return min(self.serving, max(0.0, self.profile.collecting - graphed.collecting) / self.whole)

    @property
    def saved_by_memory_on_gpu(self) -> float:
        """Of `learning`, the part that passes because batches come from the host.

        Where there was no room to try it: the part in which the GPU did nothing, or half, if that is not known either.
        """
        busy = self.readings.learning_busy
        if self.replay_on_host and self.learning_with_memory_on_gpu is None:
            return self.learning * (0.5 if busy is None else 1 - busy)
        return self.learning * _saved(self.profile.pace.learning, self.learning_with_memory_on_gpu)

    @property
    def computing(self) -> float:
        """Of `learning`, the part that the batches themselves make: no launches, and no way from the host."""
        return (self.learning - self.saved_by_memory_on_gpu) * (1 - (self.profile.update_overhead or 0.0))

    @property
    def saved_by_tf32(self) -> float:
        """Of `learning`, the part that TF32 would save whether or not batches come from the host."""
        return (self.learning - self.saved_by_memory_on_gpu) * _saved(self.learning_in_fp32, self.learning_in_tf32)

    @property
    def learning_in_fp32(self) -> float:
        """What `learning_in_tf32` compares with: seconds out of a memory on the GPU, where that was tried so too."""
        beside = self.learning_with_memory_on_gpu
        return self.profile.pace.learning if beside is None else beside

    @property
    def is_doubtful(self) -> bool:
        """Whether the whole is far from what its parts say: then predictions, which are made of parts, are rough."""
        return not 1 / _DOUBTFUL < self.seconds / self.whole < _DOUBTFUL

    @property
    def whole(self) -> float:
        """Seconds of an iteration put together from its parts; all shares are of this."""
        told = iteration_seconds(self.profile, self.config.engine, self.profile.overlap)
        if told is None:
            told = self.profile.collecting + self.profile.pace.learning + self.profile.rest
        return max(told, 1e-9)


def _saved(now: float, then: float | None) -> float:
    """The share of some seconds that other ones would save; none where these are not known."""
    return 0.0 if then is None or not now else max(0.0, 1 - then / now)
