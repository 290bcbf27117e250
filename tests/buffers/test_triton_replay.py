"""Kernels that sample batches against the plain replay buffers, on a GPU or in Triton's interpreter."""

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

ROW, WIDTH, GAMMA = 272, 3, 0.9  # 68 words: more than a program takes at a time, and no multiple


def some_steps(memory: Any, n_envs: int, steps: int, tasks: int = 0) -> None:
    """Random steps: one in four ends its episode, half of those by a limit."""
    generator = torch.Generator().manual_seed(5)

    def obs() -> torch.Tensor:
        return torch.randint(256, (n_envs, ROW), generator=generator, dtype=torch.uint8).to(DEVICE)

    memory.start(obs())
    for _ in range(steps):
        chance = torch.rand(2, n_envs, generator=generator)
        ended = chance[0] < 0.25
        happened = [
            torch.randn(n_envs, WIDTH, generator=generator),
            torch.randn(n_envs, generator=generator),
            ended & (chance[1] < 0.5),
            ended & (chance[1] >= 0.5),
        ]
        known = [torch.randint(tasks, (n_envs,), generator=generator).to(DEVICE)] if tasks else []
        memory.add(*(field.to(DEVICE) for field in happened), obs(), obs(), *known)


def assert_alike(fused: Any, plain: Any, batch_size: int) -> None:
    """The same batch from the same stream, and the stream then goes on the same."""
    streams = [torch.Generator(DEVICE).manual_seed(11) for _ in range(2)]
    mine, theirs = (memory.sample(batch_size, stream) for memory, stream in zip((fused, plain), streams))
    for ours, others in zip(mine.tensors(), theirs.tensors()):
        assert ours.dtype == others.dtype
        torch.testing.assert_close(ours, others, rtol=1e-6, atol=1e-6)
    assert torch.equal(streams[0].get_state(), streams[1].get_state())


@pytest.mark.parametrize("steps", [0, 1, 30, 300], ids=["empty", "one", "filling", "full"])
@pytest.mark.parametrize("look_ahead", [1, 3])
def test_a_batch_equals_the_plain_buffers(look_ahead: int, steps: int) -> None:
    from unidle.buffers.triton_replay import TritonReplay

    memories = [kind(700, 7, ROW, WIDTH, DEVICE, GAMMA, look_ahead) for kind in (TritonReplay, Replay)]
    for memory in memories:
        some_steps(memory, 7, steps)
    assert_alike(*memories, batch_size=101)


@pytest.mark.parametrize("n_envs", [1, 600, 5000])
def test_any_number_of_environments(n_envs: int) -> None:
    from unidle.buffers.triton_replay import TritonReplay

    memories = [kind(8 * n_envs, n_envs, ROW, WIDTH, DEVICE, GAMMA) for kind in (TritonReplay, Replay)]
    for memory in memories:
        some_steps(memory, n_envs, 5)
    assert_alike(*memories, batch_size=64)


@pytest.mark.parametrize("steps", [0, 2, 60], ids=["empty", "few", "full"])
@pytest.mark.parametrize("batch_size", [40, 42], ids=["as many", "not as many"])
def test_a_batch_of_several_tasks_equals_the_plain_buffers(batch_size: int, steps: int) -> None:
    from unidle.buffers.triton_replay import TritonTaskReplay

    memories = [kind(200, 4, 6, ROW, WIDTH, DEVICE, GAMMA) for kind in (TritonTaskReplay, TaskReplay)]
    for memory in memories:
        some_steps(memory, 6, steps, tasks=4)
    assert_alike(*memories, batch_size)


def test_verify_accepts_the_kernels_and_finds_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidle.buffers import triton_replay

    triton_replay.verify(DEVICE)
    three = lambda self, size, stream: torch.arange(size, device=DEVICE) % 3  # noqa: E731
    monkeypatch.setattr(triton_replay.TritonTaskReplay, "draw", three)
    with pytest.raises(RuntimeError, match="batches differ from the reference"):
        triton_replay.verify(DEVICE)
