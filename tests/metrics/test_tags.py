"""The tags of other libraries beside unidle's own names."""

from __future__ import annotations

from unidle.metrics.tags import CLEANRL_TAGS, SB3_TAGS, with_tags

ITERATION = {"iteration": 3.0, "wall": 2.0, "rollout/return_mean": 20.0, "train/entropy": 0.6, "train/value_loss": 5.0}


def test_metrics_are_also_under_sb3_tags() -> None:
    added = {
        "time/iterations": 3.0,
        "time/total_timesteps": 100.0,
        "time/time_elapsed": 2.0,
        "time/fps": 50.0,
        "rollout/ep_rew_mean": 20.0,
        "train/entropy_loss": -0.6,
    }
    assert with_tags(100, ITERATION, SB3_TAGS) == ITERATION | added


def test_metrics_are_also_under_cleanrl_tags() -> None:
    added = {
        "charts/SPS": 50.0,
        "charts/episodic_return": 20.0,
        "losses/entropy": 0.6,
        "losses/value_loss": 2.5,  # CleanRL's is half the squared error
    }
    assert with_tags(100, ITERATION, CLEANRL_TAGS) == ITERATION | added


def test_evaluation_has_no_speed_under_tags() -> None:
    record = {"wall": 2.0, "eval/return_mean": 7.0, "eval/length_mean": 9.0, "eval/success": 1.0}
    added = {
        "time/total_timesteps": 100.0,
        "time/time_elapsed": 2.0,
        "eval/mean_reward": 7.0,
        "eval/mean_ep_length": 9.0,
        "eval/success_rate": 1.0,
    }
    assert with_tags(100, record, SB3_TAGS) == record | added


def test_no_tag_is_given_twice_or_hides_a_metric() -> None:
    theirs = [tag.theirs for tag in (*SB3_TAGS, *CLEANRL_TAGS)]
    assert len(theirs) == len(set(theirs))
    assert not set(theirs) & {tag.ours for tag in (*SB3_TAGS, *CLEANRL_TAGS)}
