"""Triton kernels that sample batches, against the plain replay buffers, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Replay

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

OBS_BYTES, WIDTH, GAMMA = 272, 3, 0.9  # 68 words: more than a block, and not a multiple of it


def add_random_steps(buffer: Any, n_envs: int, steps: int, tasks: int = 0) -> None:
    """Adds random steps; one in four ends its episode, half of those by truncation."""
    generator = torch.Generator().manual_seed(5)

    def obs() -> torch.Tensor:
        return torch.randint(256, (n_envs, OBS_BYTES), generator=generator, dtype=torch.uint8).to(DEVICE)

    buffer.start(obs())
    for _ in range(steps):
        chance = torch.rand(2, n_envs, generator=generator)
        ended = chance[0] < 0.25
        step = [
            torch.randn(n_envs, WIDTH, generator=generator),
            torch.randn(n_envs, generator=generator),
            ended & (chance[1] < 0.5),
            ended & (chance[1] >= 0.5),
        ]
        task_args = [torch.randint(tasks, (n_envs,), generator=generator).to(DEVICE)] if tasks else []
        buffer.add(*(field.to(DEVICE) for field in step), obs(), obs(), *task_args)


def assert_same_batch(fused: Any, plain: Any, batch_size: int) -> None:
    """Both sample the same batch and leave the generator in the same state."""
    generators = [torch.Generator(DEVICE).manual_seed(11) for _ in range(2)]
    actual, expected = (buffer.sample(batch_size, generator) for buffer, generator in zip((fused, plain), generators))
    for ours, others in zip(actual.tensors(), expected.tensors()):
        assert ours.dtype == others.dtype
        torch.testing.assert_close(ours, others, rtol=1e-6, atol=1e-6)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("steps", [0, 1, 30, 300], ids=["empty", "one", "filling", "full"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_batch_matches_plain_buffer(n_step: int, steps: int) -> None:
    from unidle.buffers.triton_replay import TritonReplay

    buffers = [kind(700, 7, OBS_BYTES, WIDTH, DEVICE, GAMMA, n_step) for kind in (TritonReplay, Replay)]
    for buffer in buffers:
        add_random_steps(buffer, 7, steps)
    assert_same_batch(*buffers, batch_size=101)


@pytest.mark.parametrize("n_envs", [1, 600, 5000])
def test_batch_matches_for_any_number_of_environments(n_envs: int) -> None:
    from unidle.buffers.triton_replay import TritonReplay

    buffers = [kind(8 * n_envs, n_envs, OBS_BYTES, WIDTH, DEVICE, GAMMA) for kind in (TritonReplay, Replay)]
    for buffer in buffers:
        add_random_steps(buffer, n_envs, 5)
    assert_same_batch(*buffers, batch_size=64)


@pytest.mark.parametrize("steps", [0, 2, 60], ids=["empty", "few", "full"])
@pytest.mark.parametrize("batch_size", [40, 42], ids=["even split", "uneven split"])
def test_multitask_batch_matches_plain_buffer(batch_size: int, steps: int) -> None:
    from unidle.buffers.triton_replay import TritonTaskReplay

    buffers = [kind(200, 4, 6, OBS_BYTES, WIDTH, DEVICE, GAMMA) for kind in (TritonTaskReplay, TaskReplay)]
    for buffer in buffers:
        add_random_steps(buffer, 6, steps, tasks=4)
    assert_same_batch(*buffers, batch_size)


def test_verify_accepts_kernels_and_rejects_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidle.buffers import triton_replay

    triton_replay.verify(DEVICE)
    three = lambda self, size, generator: torch.arange(size, device=DEVICE) % 3  # noqa: E731
    monkeypatch.setattr(triton_replay.TritonTaskReplay, "sample_cells", three)
    with pytest.raises(RuntimeError, match="batches differ from the reference"):
        triton_replay.verify(DEVICE)
