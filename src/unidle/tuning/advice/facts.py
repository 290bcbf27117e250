"""The facts that advice is based on: a job's settings, its probes, a short training run and sensor readings."""

from __future__ import annotations

from dataclasses import dataclass, field

from unidle.config import Config
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes.profile import Profile
from unidle.tuning.probes.stepping import StepStats

ON_DEVICE = "iterations on the device"  # stepping and learning are a single graph and cannot be separated
_TOLERANCE = 1.3  # tolerated ratio between the measured iteration and the sum of its parts


@dataclass(frozen=True)
class Table:
    """Where the time of the short run went; shares sum to 1."""

    of_gpu: bool
    """True: GPU time by idle cause; False: the trainer thread's time by phase."""
    busy: float
    """GPU busy; 0 in a thread's table."""
    idle: dict[str, float]
    """By cause, or by phase."""
    unattributed: float

    def share(self, *causes: str) -> float:
        """Return the summed share of these causes."""
        return sum(self.idle.get(cause, 0.0) for cause in causes)


@dataclass(frozen=True)
class Readings:
    """Sensor readings during the short run; None if unavailable."""

    cores_used: float | None = None
    """Cores used by the run and its workers."""
    others_cores: float | None = None
    """Cores used by other programs, of those available to this process."""
    gpu_memory: float | None = None
    """Peak share of GPU memory in use."""
    host_memory: float | None = None
    """Peak share of the memory available to this process."""
    throttled: dict[str, float] = field(default_factory=dict)
    """Reason → share of polls at which the GPU was throttled for it."""
    learning_busy: float | None = None
    """Share of learning in which kernels ran."""


@dataclass(frozen=True)
class Facts:
    """All measurements of a training job."""

    config: Config
    profile: Profile
    seconds: float
    """Seconds per iteration in the short run."""
    table: Table
    readings: Readings = Readings()
    steps: StepStats | None = None
    """Steps of a single environment."""
    requests: bool = False
    """Whether environments send requests to a server."""
    request_counts: dict[str, int] = field(default_factory=dict)
    """Requests of the short run by outcome."""
    to_device: float | None = None
    """Bytes/s from host to GPU."""
    from_device: float | None = None
    sent_bytes: int = 0
    """Observation bytes copied to the GPU per inference call."""
    replay_on_host: bool = False
    learning_with_replay_on_gpu: float | None = None
    """Seconds of learning per rollout with the replay buffer on the GPU, if the job's is not."""
    learning_in_tf32: float | None = None
    """Seconds of learning per rollout in TF32, if the job uses fp32."""
    slow_fallbacks: tuple[str, ...] = ()
    """The engine's messages about slower fallbacks it uses."""

    @property
    def steps_per_second(self) -> float:
        """Steps/s of the short run."""
        return self.profile.steps / self.seconds

    @property
    def learning(self) -> float:
        """Share of an iteration spent in learning alone."""
        profile = self.profile
        hidden = profile.collecting if profile.overlap == "strict" else 0.0
        return min(1.0, max(0.0, profile.pace.learning - hidden) / self.modelled_seconds)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of an iteration, as far as they can be separated."""
        if self.profile.is_single_graph:
            return {ON_DEVICE: self.learning}
        return {"stepping": self.stepping, "inference": self.inference_and_sync, "learning": self.learning}

    @property
    def stepping(self) -> float:
        """Share of an iteration in which only environments step."""
        profile = self.profile
        if profile.on_device:
            alone = profile.collecting
            if profile.simulator is not None:
                alone = min(alone, profile.n_steps * profile.simulator.step)
            return min(1.0, alone / self.modelled_seconds)
        hidden = profile.pace.learning if profile.overlap == "strict" else 0.0
        return min(1.0, max(0.0, min(profile.stepping[0].seconds, profile.collecting) - hidden) / self.modelled_seconds)

    @property
    def inference_and_sync(self) -> float:
        """Share of an iteration that collecting takes beyond bare stepping: inference and synchronisation."""
        profile = self.profile
        if profile.on_device:
            return max(0.0, min(1.0, profile.collecting / self.modelled_seconds) - self.stepping)
        hidden = profile.pace.learning if profile.overlap == "strict" else 0.0
        alone = max(0.0, profile.collecting - max(hidden, profile.stepping[0].seconds))
        return min(1.0, alone / self.modelled_seconds)

    @property
    def copying(self) -> float:
        """Part of `inference_and_sync` spent copying observations to the GPU."""
        inference = self.profile.pace.inference
        if not self.to_device or not inference:
            return 0.0
        return self.inference_and_sync * min(1.0, self.sent_bytes / self.to_device / inference)

    @property
    def launching(self) -> float:
        """Part of `inference_and_sync` spent on kernel launches that a CUDA graph would save."""
        graphed = self.profile.graphed
        if graphed is None or graphed.collecting is None:
            return 0.0
        return min(
            self.inference_and_sync, max(0.0, self.profile.collecting - graphed.collecting) / self.modelled_seconds
        )

    @property
    def saved_by_replay_on_gpu(self) -> float:
        """Part of `learning` spent because batches come from the host.

        If there was no room to measure it: the GPU's idle share of learning, or half if that is unknown too.
        """
        busy = self.readings.learning_busy
        if self.replay_on_host and self.learning_with_replay_on_gpu is None:
            return self.learning * (0.5 if busy is None else 1 - busy)
        return self.learning * _saved(self.profile.pace.learning, self.learning_with_replay_on_gpu)

    @property
    def computing(self) -> float:
        """Part of `learning` that is actual computing: no launches and no copies from the host."""
        return (self.learning - self.saved_by_replay_on_gpu) * (1 - (self.profile.update_overhead or 0.0))

    @property
    def saved_by_tf32(self) -> float:
        """Part of `learning` that TF32 would save, wherever batches come from."""
        return (self.learning - self.saved_by_replay_on_gpu) * _saved(self.learning_in_fp32, self.learning_in_tf32)

    @property
    def learning_in_fp32(self) -> float:
        """The fp32 time to compare `learning_in_tf32` with: with the replay buffer on the GPU if that was measured."""
        on_gpu = self.learning_with_replay_on_gpu
        return self.profile.pace.learning if on_gpu is None else on_gpu

    @property
    def predictions_are_rough(self) -> bool:
        """Whether the measured iteration differs much from the sum of its parts, so predictions are rough."""
        return not 1 / _TOLERANCE < self.seconds / self.modelled_seconds < _TOLERANCE

    @property
    def modelled_seconds(self) -> float:
        """Predicted seconds of an iteration, the base of all shares."""
        predicted = iteration_seconds(self.profile, self.config.engine, self.profile.overlap)
        if predicted is None:
            predicted = self.profile.collecting + self.profile.pace.learning + self.profile.rest
        return max(predicted, 1e-9)


def _saved(now: float, then: float | None) -> float:
    """Return the share of `now` that `then` would save; 0 if unknown."""
    return 0.0 if then is None or not now else max(0.0, 1 - then / now)
