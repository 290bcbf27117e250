"""What the probes of a training job tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from unidle.tuning.probes.profile import Profile
from unidle.tuning.probes.stepping import Steps


@dataclass
class Probed:
    """A profile, and what else the probes saw."""

    profile: Profile
    steps: Steps | None
    """Of one environment by itself; None where its steps are quick, or none can be by itself."""
    requests: bool
    """The environments ask a server."""
    to_device: float | None
    """Bytes a second from the host to the GPU."""
    from_device: float | None
    replay_on_host: bool
    """What is remembered lies on the host though the networks are on a GPU."""
    sent_bytes: int = 0
    """Of observations, to the GPU, for each inference."""
    learning_with_memory_on_gpu: float | None = None
    """Seconds of learning from one rollout if what is remembered lay on the GPU, where it does not."""
    learning_in_tf32: float | None = None
    """The same with products in TF32, where they are in fp32."""
    messages: list[str] = field(default_factory=list)
    """What the engine said while it was set up: above all, what takes a slower way than it could."""
