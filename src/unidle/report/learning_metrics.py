"""The metrics of learning that a run records: what pages call them, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from unidle.report.history import Record, number

TITLES = {  # metric → title, meaning
    "train/policy_loss": ("Policy loss", "clipped surrogate"),
    "train/value_loss": ("Value loss", "squared error of returns"),
    "train/loss": ("Loss", "of the Q network"),
    "train/critic_loss": ("Critic loss", "of all critics together"),
    "train/value": ("Q value", "of the actions in the batch"),
    "train/actor_loss": ("Actor loss", "negated Q value of the policy's actions"),
    "train/entropy": ("Entropy", "nats per action"),
    "train/temperature": ("Entropy coefficient", "weight of the entropy"),
    "train/epsilon": ("Epsilon", "share of random actions"),
    "train/approx_kl": ("Approximate KL", "nats from the policy before the update"),
    "train/clip_fraction": ("Clip fraction", "share of samples clipped"),
    "train/effective_sample_share": ("Effective sample share", "by importance weights"),
    "train/explained_variance": ("Explained variance", "of returns by values; 1 is best"),
}
SECTION_MEANINGS = {
    "recipe": "affects learning",
    "engine": "affects only speed",
    "run": "task, duration, output",
}


def learned_records(iterations: Sequence[Record]) -> list[Record]:
    """Return the iterations with updates: none while a replay buffer fills."""
    return [record for record in iterations if record.get("train/updates") != 0]


def titled_metrics(records: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Return metric → title, meaning of those in `TITLES` that the records have."""
    return {key: names for key, names in TITLES.items() if any(key in record for record in records)}


def changing_metrics(records: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Return `titled_metrics`, and other metrics of learning whose values change."""
    found: dict[str, set[float]] = {}
    for record in records:
        for key in record:
            if key.startswith("train/") and key not in TITLES and (value := number(record, key)) is not None:
                found.setdefault(key, set()).add(value)
    others = [key for key, values in found.items() if len(values) > 1]
    return titled_metrics(records) | {key: (_words(key), key) for key in others}


def _words(key: str) -> str:
    """train/grad_norm → Grad norm."""
    return key.removeprefix("train/").replace("_", " ").replace("/", ", ").capitalize()
