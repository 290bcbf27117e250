"""The multi-task replay buffer: a ring per task against plain lists, and how tasks share a batch."""

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_buffers import (
    ACTION_WIDTH,
    BOTH,
    CONTINUES,
    CPU,
    GAMMA,
    OBS_BYTES,
    TERMINATED,
    TRUNCATED,
    actions_of,
    equal_transitions,
    observations_of,
    read_batch,
    reward_of,
    seeded,
)

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Transitions
from unidle.errors import UsageError


@dataclass
class Step:
    """The task and the kind of step of each of N environments."""

    tasks: list[int]
    ends: list[int]


@st.composite
def task_histories(draw: st.DrawFn) -> tuple[int, int, list[Step]]:
    """(tasks, places per task, steps)"""
    n_tasks, n_envs = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def each(elements: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(elements, min_size=n_envs, max_size=n_envs)

    step = st.builds(Step, each(st.integers(0, n_tasks - 1)), each(st.sampled_from(range(4))))
    return n_tasks, n_envs + draw(st.integers(0, 5)), draw(st.lists(step, min_size=1, max_size=30))


@given(task_histories())
def test_each_task_has_its_own_ring_and_equal_batch_share(
    history: tuple[int, int, list[Step]],
) -> None:
    n_tasks, places, steps = history
    n_envs = len(steps[0].tasks)
    replay = TaskReplay(places * n_tasks, n_tasks, n_envs, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    rings: list[deque] = [deque(maxlen=places) for _ in range(n_tasks)]
    open_ids = list(range(n_envs))
    replay.start(observations_of(open_ids))
    for t, step in enumerate(steps, start=1):
        next_ids = [1000 * t + env for env in range(n_envs)]
        finals = [1000 * t + 500 + env for env in range(n_envs)]
        replay.add(
            actions_of(open_ids),
            torch.tensor([float(reward_of(name)) for name in open_ids]),
            torch.tensor([end in (TERMINATED, BOTH) for end in step.ends]),
            torch.tensor([end in (TRUNCATED, BOTH) for end in step.ends]),
            observations_of(next_ids),
            observations_of(finals),
            torch.tensor(step.tasks),
        )
        for env, (task, end) in enumerate(zip(step.tasks, step.ends)):
            discount = 0.0 if end in (TERMINATED, BOTH) else GAMMA
            true_next = next_ids[env] if end == CONTINUES else finals[env]
            rings[task].append((open_ids[env], (float(reward_of(open_ids[env])), discount, true_next)))
        open_ids = next_ids
    assert replay.counts.tolist() == [len(ring) for ring in rings]
    batch = replay.sample(300 * n_tasks, seeded())
    for task, ring in enumerate(rings):
        share = Transitions(*(t[300 * task : 300 * (task + 1)] for t in batch.tensors()))
        assert share.weights.tolist() == [float(len(ring) > 0)] * 300
        assert (share.index // places).tolist() == [task] * 300
        if ring:
            assert read_batch(share) == dict(ring)


def test_draws_within_a_task_are_uniform() -> None:
    replay = TaskReplay(30, 3, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    replay.n_added.copy_(torch.tensor([4, 10, 77]))
    counts = torch.bincount(replay.sample(30_000, seeded(2)).index, minlength=30).view(3, 10).double()
    for cell_counts, n_stored in zip(counts, (4, 10, 10)):
        assert (cell_counts[n_stored:] == 0).all()
        mean = 10_000 / n_stored
        assert ((cell_counts[:n_stored] - mean) ** 2 / mean).sum() < n_stored - 1 + 4 * (2 * (n_stored - 1)) ** 0.5


def task_counts(replay: TaskReplay, places: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
    """[K] samples per task in one batch, which is ordered by task."""
    tasks = replay.sample(batch_size, generator).index // places
    assert (tasks.diff() >= 0).all()
    return torch.bincount(tasks, minlength=len(replay.counts))


@given(n_tasks=st.integers(1, 12), batch_size=st.integers(1, 60))
def test_batch_is_split_evenly_between_tasks(n_tasks: int, batch_size: int) -> None:
    replay = TaskReplay(5 * n_tasks, n_tasks, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    replay.n_added.fill_(3)
    counts = task_counts(replay, 5, batch_size, seeded())
    assert counts.sum() == batch_size
    share, rest = divmod(batch_size, n_tasks)
    assert counts.sort().values.tolist() == [share] * (n_tasks - rest) + [share + 1] * rest


@given(n_tasks=st.integers(2, 12), batch_size=st.integers(1, 60))
def test_tasks_have_equal_shares_over_all_shifts(n_tasks: int, batch_size: int) -> None:
    replay = TaskReplay(5 * n_tasks, n_tasks, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    total = torch.zeros(n_tasks, dtype=torch.long)
    for shift in range(n_tasks if batch_size % n_tasks else 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", lambda high, shape, generator, device: torch.full(shape, shift))  # noqa: B023
            total += task_counts(replay, 5, batch_size, seeded())
    assert total.unique().numel() == 1


def test_tasks_with_one_more_sample_are_random() -> None:
    replay, generator = TaskReplay(100, 10, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA), seeded(3)
    replay.n_added.fill_(10)
    more = torch.zeros(10)
    for _ in range(1000):
        counts = task_counts(replay, 10, 512, generator)
        assert counts.sort().values.tolist() == [51] * 8 + [52] * 2
        more += counts - 51
    assert (more - 200).abs().max() < 4 * (1000 * 0.2 * 0.8) ** 0.5
    assert equal_transitions(replay.sample(512, seeded(4)), replay.sample(512, seeded(4)))


def test_evenly_split_batch_draws_only_places() -> None:
    replay = TaskReplay(40, 4, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    replay.n_added.copy_(torch.tensor([3, 10, 55, 1]))
    draws = torch.rand((4, 6), dtype=torch.float64, generator=seeded(5))
    places = (draws * torch.tensor([[3], [10], [10], [1]])).long()
    assert replay.sample(24, seeded(5)).index.tolist() == (torch.arange(4)[:, None] * 10 + places).flatten().tolist()


def test_task_ring_smaller_than_n_envs_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"at least 200\."):
        TaskReplay(199, 10, 20, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
