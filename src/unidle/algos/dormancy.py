"""When to warn about dormant neurons, and the warning. Imports no torch."""

from __future__ import annotations

DORMANT = "plasticity/critic/dormant"  # name of the metric
TOO_DORMANT = 0.3  # share of the neurons
MIN_UPDATES = 10_000  # before this many updates, the share depends mostly on the initial weights
IN_A_ROW = 2  # evaluations above the limit before a warning: a single one depends on its batch


def dormancy_warning(share: float) -> str:
    """The warning for a critic with this share of dormant neurons."""
    return (
        f"{share:.0%} of the critic's neurons are dormant and hardly learn; train on more tasks as you add parameters, "
        "or use a smaller network (McLean et al. 2025)."
    )
