"""The replay buffer in NumPy against the one in torch: the same contents and the same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from replay_buffers import ACTION_WIDTH, CPU, GAMMA, OBS_BYTES, add_steps, seeded

from unidle.buffers.numpy_replay import NumpyReplay
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay


def buffers(n_steps: int, *, prioritised: bool) -> list[Any]:
    """A buffer in NumPy and one in torch, for 3 environments."""
    made: list[Any] = [kind(36, 3, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA, n_steps) for kind in (NumpyReplay, Replay)]
    return [Prioritised(buffer, 0.6, 0.4) for buffer in made] if prioritised else made


@pytest.mark.parametrize("steps", [0, 1, 5, 40], ids=["empty", "one step", "filling", "full"])
@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("prioritised", [False, True], ids=["uniform", "prioritised"])
def test_contents_and_batches_equal_those_in_torch(prioritised: bool, n_steps: int, steps: int) -> None:
    both = buffers(n_steps, prioritised=prioritised)
    generators = [seeded(3), seeded(3)]
    for buffer in both:
        rng = np.random.default_rng(0)
        buffer.start(torch.from_numpy(rng.integers(0, 256, (3, OBS_BYTES), np.uint8)))
        add_steps(buffer, rng, steps)
        for restarted in ([True, False, True], [False, False, False]):  # between two rollouts
            obs = torch.from_numpy(rng.integers(0, 256, (3, OBS_BYTES), np.uint8))
            buffer.start(obs, torch.tensor(restarted))
            add_steps(buffer, rng, min(steps, 3))
    ours, reference = (buffer.state_dict() for buffer in both)
    assert all(torch.equal(ours[name], reference[name]) for name in reference)
    batches = [buffer.sample(64, generator) for buffer, generator in zip(both, generators)]
    for one, other in zip(*(batch.tensors() for batch in batches)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("steps", [1, 4, 9, 30], ids=["one step", "few", "nearly a ring", "more than a ring"])
def test_rollout_is_added_as_its_steps_are(steps: int) -> None:
    whole, one_by_one = (NumpyReplay(36, 3, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA) for _ in range(2))
    generator = seeded(4)
    for _ in range(5):
        shape = (steps, 3)
        obs, final_obs = torch.randint(0, 256, (2, *shape, OBS_BYTES), dtype=torch.uint8, generator=generator)
        terminated, truncated = torch.rand(2, *shape, generator=generator) < 0.2
        actions, rewards = torch.rand(*shape, ACTION_WIDTH, generator=generator), torch.rand(shape, generator=generator)
        rollout = actions, rewards, terminated, truncated, obs, final_obs
        whole.add_rollout(*(tensor.numpy() for tensor in rollout))
        for step in zip(*rollout):
            one_by_one.add(*step)
        ours, expected = whole.state_dict(), one_by_one.state_dict()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert (whole.n_overwritten > 0).any() == (steps > 1)


def test_loaded_state_is_used() -> None:
    filled, empty = (NumpyReplay(36, 3, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA) for _ in range(2))
    add_steps(filled, np.random.default_rng(0), 20)
    empty.load_state_dict(filled.state_dict())
    for buffer in (filled, empty):
        add_steps(buffer, np.random.default_rng(1), 3)
    batches = [buffer.sample(64, seeded()).tensors() for buffer in (filled, empty)]
    assert all(torch.equal(one, other) for one, other in zip(*batches))
