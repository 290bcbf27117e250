"""The results of probing a training job."""

from __future__ import annotations

from dataclasses import dataclass, field

from unidle.tuning.probes.profile import Profile
from unidle.tuning.probes.stepping import StepStats


@dataclass
class ProbeResults:
    """A profile and further measurements."""

    profile: Profile
    steps: StepStats | None
    """Steps of a single environment; None if they are quick or it cannot be stepped alone."""
    requests: bool
    """Whether environments send requests to a server."""
    to_device: float | None
    """Bytes/s from the host to the GPU."""
    from_device: float | None
    replay_on_host: bool
    """Whether the replay buffer is on the host although the networks are on a GPU."""
    sent_bytes: int = 0
    """Observation bytes copied to the GPU per inference call."""
    learning_with_replay_on_gpu: float | None = None
    """Seconds of learning per rollout with the replay buffer on the GPU, if the job's is not."""
    learning_in_tf32: float | None = None
    """Seconds of learning per rollout in TF32, if the job uses fp32."""
    messages: list[str] = field(default_factory=list)
    """The engine's messages during set-up, mainly about slower fallbacks."""
