"""When too much of a network has fallen asleep, and what to do then; without torch, for whoever only reads of it."""

from __future__ import annotations

DORMANT = "plasticity/critic/dormant"  # the metric
TOO_DORMANT = 0.3


def remedy(share: float) -> str:
    """What to do when so large a share of the critic is dormant."""
    return (
        f"{share:.0%} of the critic's neurons are dormant and learn little any more; train on more tasks together as "
        "you add parameters, or make the model smaller (McLean et al. 2025)."
    )
