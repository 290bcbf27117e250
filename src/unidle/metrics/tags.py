"""Tags that tools of other libraries look for; TensorBoard and W&B get them in addition to unidle's own.

Metrics whose name and meaning are the same need no entry: `train/value_loss`, `train/approx_kl`, `train/actor_loss`, …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tag(NamedTuple):
    """Another name of a metric."""

    ours: str
    theirs: str
    factor: float = 1.0  # theirs = factor × ours


_FPS = "fps"  # steps per second since the start of the run, in iteration records

SB3_TAGS = (
    Tag("rollout/return_mean", "rollout/ep_rew_mean"),
    Tag("rollout/length_mean", "rollout/ep_len_mean"),
    Tag("rollout/success", "rollout/success_rate"),
    Tag("eval/return_mean", "eval/mean_reward"),
    Tag("eval/length_mean", "eval/mean_ep_length"),
    Tag("eval/success", "eval/success_rate"),
    Tag(_FPS, "time/fps"),
    Tag("step", "time/total_timesteps"),
    Tag("iteration", "time/iterations"),
    Tag("wall", "time/time_elapsed"),
    Tag("rollout/episodes", "time/episodes"),
    Tag("train/policy_loss", "train/policy_gradient_loss"),
    Tag("train/entropy", "train/entropy_loss", -1.0),
    Tag("train/temperature", "train/ent_coef"),
    Tag("train/epsilon", "rollout/exploration_rate"),
)
CLEANRL_TAGS = (
    Tag("rollout/return_mean", "charts/episodic_return"),
    Tag("rollout/length_mean", "charts/episodic_length"),
    Tag(_FPS, "charts/SPS"),
    Tag("train/learning_rate", "charts/learning_rate"),
    Tag("train/policy_loss", "losses/policy_loss"),
    Tag("train/value_loss", "losses/value_loss", 0.5),
    Tag("train/entropy", "losses/entropy"),
    Tag("train/approx_kl", "losses/approx_kl"),
    Tag("train/clip_fraction", "losses/clipfrac"),
    Tag("train/explained_variance", "losses/explained_variance"),
    Tag("train/actor_loss", "losses/actor_loss"),
    Tag("train/temperature", "losses/alpha"),
)


def with_tags(step: int, metrics: dict[str, float], tags: Sequence[Tag]) -> dict[str, float]:
    """The metrics of a record at `step`, also under these tags."""
    if not tags:
        return metrics
    known = {**metrics, "step": float(step)} if "wall" in metrics else metrics  # not for numbers that a callback logs
    if metrics.get("wall") and "iteration" in metrics:
        known[_FPS] = step / metrics["wall"]
    return metrics | {tag.theirs: tag.factor * known[tag.ours] for tag in tags if tag.ours in known}
