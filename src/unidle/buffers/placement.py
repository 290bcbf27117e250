"""Chooses a run's replay buffer and its device: that of the networks, or the host if the buffer is too large for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from unidle.buffers.frame_replay import FrameReplay
from unidle.buffers.frames import Frames
from unidle.buffers.multitask import TaskReplay
from unidle.buffers.numpy_replay import NumpyReplay
from unidle.buffers.prefetch import choose_buffer_device, in_gib
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay
from unidle.config import OffPolicyRecipe
from unidle.config.machine import free_memory
from unidle.errors import UsageError
from unidle.kernels.dispatch import Dispatch, Report

ReplayBuffer = Replay | TaskReplay | Prioritised

HOST = torch.device("cpu")
ON_HOST = "is on the host, and each batch is copied to the GPU"  # in the message; advice recognises it
_USABLE = 0.9  # share of the free memory; networks, CUDA graphs and workers need the rest


def usable_memory(device: torch.device) -> int:
    """Bytes of the device's free memory that buffers may use."""
    return int(_USABLE * (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()))


def fits_only_on_host(
    recipe: OffPolicyRecipe,
    obs_bytes: int,
    width: int,
    device: torch.device,
    n_tasks: int,
    report: Report,
    frames: Frames | None = None,
) -> bool:
    """Whether the buffer fits on the host but not on the device; UsageError if on neither. Allocates nothing."""
    size = recipe.buffer_size
    kind: Any = TaskReplay if n_tasks > 1 else Prioritised if recipe.per else FrameReplay if frames else Replay
    if frames is not None:
        obs_bytes = frames.frame_bytes
    bytes_each, on_gpu = kind.bytes_per_transition(obs_bytes, width), device.type == "cuda"
    room = usable_memory(device) if on_gpu else 0
    why = f"{size:,} steps need {in_gib(size * bytes_each)}, but the GPU has {in_gib(room)} free"
    if kind is Prioritised and on_gpu and size * bytes_each > room:
        raise UsageError(
            f"A prioritised replay buffer must be on the GPU: {why}; set --buffer-size to at most "
            f"{room // bytes_each:,}, or remove --per."
        )
    if choose_buffer_device(size, bytes_each, device, room, usable_memory(HOST)) == "device":
        return False
    report("The replay buffer", UsageError(f"{why}."), ON_HOST)
    return True


def new_replay_buffer(
    recipe: OffPolicyRecipe,
    obs_bytes: int,
    width: int,
    buffer_device: torch.device,
    n_tasks: int,
    dispatch: Dispatch,
    frames: Frames | None = None,
) -> ReplayBuffer:
    """An empty buffer of the kind that the recipe asks for; with `frames`, each frame of a stack is stored once."""
    size, n_envs, gamma = recipe.buffer_size, recipe.n_envs, recipe.gamma
    replay: Replay
    if frames is not None:
        replay = FrameReplay(size, n_envs, frames, width, buffer_device, gamma, n_steps=recipe.n_step)
    else:
        single_task, multi_task = _implementations(buffer_device, dispatch)
        if n_tasks > 1:
            return multi_task(size, n_tasks, n_envs, obs_bytes, width, buffer_device, gamma)
        replay = single_task(size, n_envs, obs_bytes, width, buffer_device, gamma, n_steps=recipe.n_step)
    return Prioritised(replay, recipe.per_alpha, recipe.per_beta) if recipe.per else replay


def _implementations(buffer_device: torch.device, dispatch: Dispatch) -> tuple[type[Replay], type[TaskReplay]]:
    """On a GPU the buffers that sample with Triton kernels, if these agree with the plain ones; on a host NumPy's."""
    if buffer_device.type == "cpu":
        return NumpyReplay, TaskReplay

    def build() -> tuple[type[Replay], type[TaskReplay]]:
        from unidle.buffers.triton_replay import TritonReplay, TritonTaskReplay

        return TritonReplay, TritonTaskReplay

    def check(kinds: tuple[type[Replay], type[TaskReplay]]) -> None:
        from unidle.buffers.triton_replay import verify

        verify(buffer_device)

    unsupported = "Triton is not installed" if find_spec("triton") is None else None
    return dispatch.choose("Replay sampling", (Replay, TaskReplay), build, check, unsupported)
