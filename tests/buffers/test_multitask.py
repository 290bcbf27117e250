"""A ring for each task against plain lists, and who gives how much to a batch."""

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_buffers import (
    BOTH,
    CPU,
    GAMMA,
    GOES_ON,
    ROW_BYTES,
    TERMINATED,
    TRUNCATED,
    WIDTH,
    actions_of,
    read,
    reward_of,
    rows_of,
    same,
    seeded,
)

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Transitions
from unidle.errors import UsageError


@dataclass
class Step:
    """What each of N environments did, in which task."""

    tasks: list[int]
    ends: list[int]


@st.composite
def task_histories(draw: st.DrawFn) -> tuple[int, int, list[Step]]:
    """(tasks, places of each, steps)"""
    n_tasks, n_envs = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def each(elements: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(elements, min_size=n_envs, max_size=n_envs)

    step = st.builds(Step, each(st.integers(0, n_tasks - 1)), each(st.sampled_from(range(4))))
    return n_tasks, n_envs + draw(st.integers(0, 5)), draw(st.lists(step, min_size=1, max_size=30))


@given(task_histories())
def test_each_task_has_a_ring_of_its_own_and_an_equal_share_of_the_batch(
    history: tuple[int, int, list[Step]],
) -> None:
    n_tasks, places, steps = history
    n_envs = len(steps[0].tasks)
    replay = TaskReplay(places * n_tasks, n_tasks, n_envs, ROW_BYTES, WIDTH, CPU, GAMMA)
    rings: list[deque] = [deque(maxlen=places) for _ in range(n_tasks)]
    open_names = list(range(n_envs))
    replay.start(rows_of(open_names))
    for t, step in enumerate(steps, start=1):
        following = [1000 * t + env for env in range(n_envs)]
        finals = [1000 * t + 500 + env for env in range(n_envs)]
        replay.add(
            actions_of(open_names),
            torch.tensor([float(reward_of(name)) for name in open_names]),
            torch.tensor([end in (TERMINATED, BOTH) for end in step.ends]),
            torch.tensor([end in (TRUNCATED, BOTH) for end in step.ends]),
            rows_of(following),
            rows_of(finals),
            torch.tensor(step.tasks),
        )
        for env, (task, end) in enumerate(zip(step.tasks, step.ends)):
            discount = 0.0 if end in (TERMINATED, BOTH) else GAMMA
            true_next = following[env] if end == GOES_ON else finals[env]
            rings[task].append((open_names[env], (float(reward_of(open_names[env])), discount, true_next)))
        open_names = following
    assert replay.counts.tolist() == [len(ring) for ring in rings]
    batch = replay.sample(300 * n_tasks, seeded())
    for task, ring in enumerate(rings):
        share = Transitions(*(t[300 * task : 300 * (task + 1)] for t in batch.tensors()))
        assert share.weights.tolist() == [float(len(ring) > 0)] * 300
        assert (share.index // places).tolist() == [task] * 300
        if ring:
            assert read(share) == dict(ring)


def test_draws_within_a_task_are_uniform() -> None:
    replay = TaskReplay(30, 3, 1, ROW_BYTES, WIDTH, CPU, GAMMA)
    replay.entered.copy_(torch.tensor([4, 10, 77]))
    counts = torch.bincount(replay.sample(30_000, seeded(2)).index, minlength=30).view(3, 10).double()
    for row, held in zip(counts, (4, 10, 10)):
        assert (row[held:] == 0).all()
        mean = 10_000 / held
        assert ((row[:held] - mean) ** 2 / mean).sum() < held - 1 + 4 * (2 * (held - 1)) ** 0.5


def task_counts(replay: TaskReplay, places: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
    """[K] how many of a batch are of each task, which come one after the other."""
    tasks = replay.sample(batch_size, generator).index // places
    assert (tasks.diff() >= 0).all()
    return torch.bincount(tasks, minlength=len(replay.counts))


@given(n_tasks=st.integers(1, 12), batch_size=st.integers(1, 60))
def test_a_batch_is_shared_out_as_evenly_as_can_be(n_tasks: int, batch_size: int) -> None:
    replay = TaskReplay(5 * n_tasks, n_tasks, 1, ROW_BYTES, WIDTH, CPU, GAMMA)
    replay.entered.fill_(3)
    counts = task_counts(replay, 5, batch_size, seeded())
    assert counts.sum() == batch_size
    share, rest = divmod(batch_size, n_tasks)
    assert counts.sort().values.tolist() == [share] * (n_tasks - rest) + [share + 1] * rest


@given(n_tasks=st.integers(2, 12), batch_size=st.integers(1, 60))
def test_over_all_shifts_every_task_has_the_same_share(n_tasks: int, batch_size: int) -> None:
    replay = TaskReplay(5 * n_tasks, n_tasks, 1, ROW_BYTES, WIDTH, CPU, GAMMA)
    total = torch.zeros(n_tasks, dtype=torch.long)
    for shift in range(n_tasks if batch_size % n_tasks else 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", lambda high, shape, generator, device: torch.full(shape, shift))  # noqa: B023
            total += task_counts(replay, 5, batch_size, seeded())
    assert total.unique().numel() == 1


def test_512_of_ten_tasks_are_51_or_52_of_each_and_who_gives_more_is_drawn() -> None:
    replay, generator = TaskReplay(100, 10, 1, ROW_BYTES, WIDTH, CPU, GAMMA), seeded(3)
    replay.entered.fill_(10)
    more = torch.zeros(10)
    for _ in range(1000):
        counts = task_counts(replay, 10, 512, generator)
        assert counts.sort().values.tolist() == [51] * 8 + [52] * 2
        more += counts - 51
    assert (more - 200).abs().max() < 4 * (1000 * 0.2 * 0.8) ** 0.5
    assert same(replay.sample(512, seeded(4)), replay.sample(512, seeded(4)))


def test_a_batch_that_is_a_multiple_of_the_tasks_draws_nothing_but_places() -> None:
    replay = TaskReplay(40, 4, 1, ROW_BYTES, WIDTH, CPU, GAMMA)
    replay.entered.copy_(torch.tensor([3, 10, 55, 1]))
    draws = torch.rand((4, 6), dtype=torch.float64, generator=seeded(5))
    places = (draws * torch.tensor([[3], [10], [10], [1]])).long()
    assert replay.sample(24, seeded(5)).index.tolist() == (torch.arange(4)[:, None] * 10 + places).flatten().tolist()


def test_a_task_ring_smaller_than_the_environments_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at least 200\."):
        TaskReplay(199, 10, 20, ROW_BYTES, WIDTH, CPU, GAMMA)
