"""The share of one rank in a recipe."""

import pytest

from unidle.config import Config, Engine, PPORecipe, SACRecipe, recipe_for
from unidle.distributed.share import not_pinned, quiet_share, share_of
from unidle.errors import UsageError


def test_ranks_share_environments_and_minibatches() -> None:
    share = share_of(PPORecipe(n_envs=64, n_steps=32, batch_size=1024), 4)
    assert (share.n_envs, share.n_steps, share.batch_size) == (16, 32, 256)


def test_ranks_share_replay_buffer_but_count_steps_and_updates_of_the_job() -> None:
    whole = SACRecipe(n_envs=6, batch_size=300, buffer_size=1000, learning_starts=100, utd_ratio=0.5)
    share = share_of(whole, 3)
    assert isinstance(share, SACRecipe)
    assert (share.n_envs, share.batch_size, share.buffer_size) == (2, 100, 333)
    assert (share.learning_starts, share.utd_ratio) == (100, 0.5)


@pytest.mark.parametrize(
    ("recipe", "size", "sentence"),
    [
        ({"n_envs": 10, "batch_size": 64}, 4, "`n_envs` is 10, which is not divisible by 4 ranks; use 8 or 12, or"),
        ({"n_envs": 2, "batch_size": 64}, 3, "`n_envs` is 2, which is not divisible by 3 ranks; use 3, or another"),
        ({"n_envs": 9, "batch_size": 64}, 3, "`batch_size` is 64, which is not divisible by 3 ranks; use 63 or 66,"),
    ],
)
def test_what_does_not_divide_is_refused(recipe: dict, size: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        share_of(PPORecipe(**recipe), size)


def test_recurrent_policy_keeps_length_of_its_sequences() -> None:
    recipe = PPORecipe(n_envs=8, n_steps=64, batch_size=256, recurrent="gru")
    assert share_of(recipe, 4).batch_size == 64
    with pytest.raises(UsageError, match="sequences of 64 steps, but with a batch of 32 on each of 8 ranks they would"):
        share_of(recipe, 8)


def test_several_tasks_are_refused() -> None:
    with pytest.raises(UsageError, match="Multi-task training"):
        share_of(recipe_for("sac", n_envs=10, n_tasks=10), 2)


def test_other_ranks_evaluate_and_write_nothing() -> None:
    run = quiet_share(Config().with_run(env="CartPole-v1", target_return=1.0, wandb=True, trace=True)).run
    assert run.evaluation_interval == 0
    assert not any((run.target_return, run.tensorboard, run.wandb, run.monitor_csv, run.trace))


def test_worker_processes_of_several_ranks_are_not_pinned_to_the_same_cores() -> None:
    assert not_pinned(Engine()).pin_cores is False
    with pytest.raises(UsageError, match="--pin-cores"):
        not_pinned(Engine(pin_cores=True))
