"""Where a replay buffer is placed, and how batches from the host reach the device."""

import numpy as np
import pytest
import torch
from replay_buffers import CPU, OBS_BYTES, add_steps, equal_transitions, make_replay, seeded

from unidle.buffers.prefetch import Prefetch, choose_buffer_device
from unidle.buffers.replay import Transitions
from unidle.errors import UsageError


def test_prefetched_batches_match_the_buffer_and_reuse_tensors() -> None:
    replay = make_replay()
    replay.start(torch.zeros(3, OBS_BYTES, dtype=torch.uint8))
    add_steps(replay, np.random.default_rng(8), 20)
    prefetch, expected, generator = Prefetch(replay, 16, CPU), seeded(9), seeded(9)
    prefetch.send(generator)
    first = prefetch.take()
    addresses = [t.data_ptr() for t in first.tensors()]
    assert equal_transitions(first, replay.sample(16, expected))
    kept = Transitions(*(t.clone() for t in first.tensors()))
    prefetch.send(generator)
    assert equal_transitions(first, kept)  # valid until the next `take`
    second = prefetch.take()
    assert equal_transitions(second, replay.sample(16, expected))
    before = generator.get_state()
    assert prefetch.sample(16, generator) is second  # already sampled, so the generator does not advance
    assert torch.equal(generator.get_state(), before)
    assert [t.data_ptr() for t in prefetch.batch.tensors()] == addresses


GIB = 2**30
CUDA = torch.device("cuda")


def test_buffer_is_on_device_if_it_fits_and_else_on_host() -> None:
    assert choose_buffer_device(10, GIB, CUDA, 10 * GIB, 0) == "device"
    assert choose_buffer_device(10, GIB, CUDA, 10 * GIB - 1, 10 * GIB) == "host"
    assert choose_buffer_device(10, GIB, CPU, 0, 10 * GIB) == "device"  # the device is the host


def test_buffer_that_fits_nowhere_is_rejected_with_largest_size() -> None:
    with pytest.raises(UsageError) as error:
        choose_buffer_device(2_000, GIB // 16, CUDA, 80 * GIB, 96 * GIB + 1)
    assert str(error.value) == (
        "A replay buffer of 2,000 steps needs 125.0 GiB, but cuda has 80.0 GiB free and the host has "
        "96.0 GiB free; set --buffer-size to at most 1,536."
    )
    with pytest.raises(UsageError) as error:
        choose_buffer_device(2_000, GIB // 16, CPU, 500 * GIB, 96 * GIB)
    assert str(error.value) == (
        "A replay buffer of 2,000 steps needs 125.0 GiB, but the host has 96.0 GiB free; "
        "set --buffer-size to at most 1,536."
    )
    assert choose_buffer_device(1_536, GIB // 16, CPU, 0, 96 * GIB) == "device"


@pytest.mark.gpu
def test_prefetched_batches_are_intact_while_gpu_is_busy() -> None:
    replay = make_replay()
    replay.start(torch.zeros(3, OBS_BYTES, dtype=torch.uint8))
    add_steps(replay, np.random.default_rng(12), 30)
    prefetch, expected, generator = Prefetch(replay, 4096, CUDA), seeded(13), seeded(13)
    work = torch.randn(2048, 2048, device=CUDA)
    taken = []
    prefetch.send(generator)
    for _ in range(20):
        batch = prefetch.take()
        prefetch.send(generator)  # while the work below still reads the batch
        work = (work @ work).tanh()
        taken.append(Transitions(*(t.clone() for t in batch.tensors())))
    for batch in taken:
        assert equal_transitions(Transitions(*(t.cpu() for t in batch.tensors())), replay.sample(4096, expected))
