"""Where a memory lives, and how batches of one on the host get to the device."""

import numpy as np
import pytest
import torch
from replay_buffers import CPU, ROW_BYTES, live, make_replay, same, seeded

from unidle.buffers.prefetch import Prefetch, choose_place
from unidle.buffers.replay import Transitions
from unidle.errors import UsageError


def test_prefetched_batches_are_the_memory_s_own_in_tensors_that_stay() -> None:
    replay = make_replay()
    replay.start(torch.zeros(3, ROW_BYTES, dtype=torch.uint8))
    live(replay, np.random.default_rng(8), 20)
    prefetch, expected, generator = Prefetch(replay, 16, CPU), seeded(9), seeded(9)
    prefetch.send(generator)
    first = prefetch.take()
    addresses = [t.data_ptr() for t in first.tensors()]
    assert same(first, replay.sample(16, expected))
    kept = Transitions(*(t.clone() for t in first.tensors()))
    prefetch.send(generator)
    assert same(first, kept)  # until the next is taken
    second = prefetch.take()
    assert same(second, replay.sample(16, expected))
    before = generator.get_state()
    assert prefetch.sample(16, generator) is second  # what an update asks for is there already
    assert torch.equal(generator.get_state(), before)
    assert [t.data_ptr() for t in prefetch.batch.tensors()] == addresses


GIB = 2**30
CUDA = torch.device("cuda")


def test_a_memory_lives_on_the_device_where_it_fits_there_and_on_the_host_where_not() -> None:
    assert choose_place(10, GIB, CUDA, 10 * GIB, 0) == "device"
    assert choose_place(10, GIB, CUDA, 10 * GIB - 1, 10 * GIB) == "host"
    assert choose_place(10, GIB, CPU, 0, 10 * GIB) == "device"  # the device is the host


def test_a_replay_buffer_that_fits_nowhere_names_the_sizes_and_what_would_fit() -> None:
    with pytest.raises(UsageError) as error:
        choose_place(2_000, GIB // 16, CUDA, 80 * GIB, 96 * GIB + 1)
    assert str(error.value) == (
        "A replay buffer of 2,000 steps needs 125.0 GiB, but cuda has 80.0 GiB free and the host has "
        "96.0 GiB free; set --buffer-size to at most 1,536."
    )
    with pytest.raises(UsageError) as error:
        choose_place(2_000, GIB // 16, CPU, 500 * GIB, 96 * GIB)
    assert str(error.value) == (
        "A replay buffer of 2,000 steps needs 125.0 GiB, but the host has 96.0 GiB free; "
        "set --buffer-size to at most 1,536."
    )
    assert choose_place(1_536, GIB // 16, CPU, 0, 96 * GIB) == "device"


@pytest.mark.gpu
def test_prefetched_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    replay = make_replay()
    replay.start(torch.zeros(3, ROW_BYTES, dtype=torch.uint8))
    live(replay, np.random.default_rng(12), 30)
    prefetch, expected, generator = Prefetch(replay, 4096, CUDA), seeded(13), seeded(13)
    work = torch.randn(2048, 2048, device=CUDA)
    taken = []
    prefetch.send(generator)
    for _ in range(20):
        batch = prefetch.take()
        prefetch.send(generator)  # while the stream below still reads the batch
        work = (work @ work).tanh()
        taken.append(Transitions(*(t.clone() for t in batch.tensors())))
    for batch in taken:
        assert same(Transitions(*(t.cpu() for t in batch.tensors())), replay.sample(4096, expected))
