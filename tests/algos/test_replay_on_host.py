"""A replay buffer on the host: its contents and batches, when it is placed there, and whole training runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import unidle
from unidle.algos.capturing import no_capture
from unidle.algos.experience_replay import ExperienceReplay, Updates
from unidle.buffers import placement as subject
from unidle.buffers.frames import Frames
from unidle.buffers.prefetch import Prefetch
from unidle.buffers.replay import Replay, Transitions
from unidle.buffers.rollout import Rollout
from unidle.config import DQNRecipe, Recipe, SACRecipe, recipe_for
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.cuda_graphs import Capture
from unidle.errors import UsageError
from unidle.spaces.observations import ObservationLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
SMALL: dict[str, Any] = {"algo": "sac", "n_envs": 3, "n_steps": 8, "batch_size": 16, "buffer_size": 120}


@pytest.fixture
def _host_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places the replay buffer on the host, even if the device is the CPU."""
    monkeypatch.setattr(subject, "choose_buffer_device", lambda *sizes: "host")


def tasks_of(obs: Tensor) -> Tensor:
    return obs[:, 0].long() % 3


def random_rollout(seed: int) -> Rollout:
    """8 random steps of 3 environments; some terminate, some truncate."""
    draw = torch.Generator().manual_seed(seed)
    rollout = Rollout(8, 3, 16, 2, 0, CPU)
    rollout.obs.copy_(torch.randint(256, rollout.obs.shape, generator=draw))
    rollout.actions.copy_(torch.rand(rollout.actions.shape, generator=draw))
    rollout.rewards.copy_(torch.rand(rollout.rewards.shape, generator=draw))
    rollout.terminated.copy_(torch.rand(rollout.rewards.shape, generator=draw) < 0.1)
    rollout.truncated.copy_(torch.rand(rollout.rewards.shape, generator=draw) < 0.1)
    rollout.final_at = rollout.truncated.flatten().nonzero().squeeze(1)
    rollout.final_obs = torch.randint(256, (len(rollout.final_at), 16), generator=draw).to(torch.uint8)
    return rollout


@pytest.mark.parametrize("n_tasks", [1, 3])
def test_host_buffer_stores_same_transitions_as_device_buffer(n_tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_for(**SMALL, n_tasks=n_tasks)
    states = []
    for place in ("device", "host"):
        monkeypatch.setattr(subject, "choose_buffer_device", lambda *sizes, place=place: place)
        experience = ExperienceReplay(
            recipe, 16, 2, CPU, no_capture, n_tasks=n_tasks, tasks_of=tasks_of if n_tasks > 1 else None
        )
        for number in range(7):
            experience.store(random_rollout(number))
        states.append(experience.state_dict())
        assert isinstance(experience.sampler, Prefetch) == (place == "host")
    for name, value in states[0]["memory"].items():
        assert torch.equal(value, states[1]["memory"][name]), name
    assert states[0]["memory"]["entered"].sum() == 7 * 24


@pytest.mark.usefixtures("_host_placement")
def test_each_update_samples_a_new_batch_that_can_hold_newest_steps() -> None:
    recipe = recipe_for(**SMALL, utd_ratio=1.5, learning_starts=24)
    experience = ExperienceReplay(recipe, 16, 2, CPU, no_capture)
    seen: list[Transitions] = []

    def update(generator: torch.Generator, phase: int) -> None:
        batch = experience.sampler.sample(16, generator)
        seen.append(Transitions(*(t.clone() for t in batch.tensors())))

    updates = Updates(update, [], CPU, no_capture)
    for number in range(3):
        seen.clear()
        newest = random_rollout(number)
        steps = list(experience.store_and_update(newest, updates, torch.Generator().manual_seed(number)))
        assert len(seen) == (36 if number else 0)  # no update is due before learning starts
        assert len(steps) == len(seen)  # control returns after each update, so that the trainer can act
        replay = experience.buffer
        assert isinstance(replay, Replay)
        for batch in seen:
            for mine, theirs in zip(batch.tensors(), replay.gather(batch.index).tensors()):
                assert torch.equal(mine, theirs)
        assert len({tuple(batch.index.tolist()) for batch in seen}) == len(seen)
        if seen:
            drawn = torch.cat([batch.obs for batch in seen]).view(torch.int64)[:, 0]
            assert torch.isin(newest.obs[1:-1].flatten(0, 1).view(torch.int64)[:, 0], drawn).all()


# -- placement ---------------------------------------------------------------------------------------------------------


def set_free_memory(gpu: int, monkeypatch: pytest.MonkeyPatch, host: int = 10 * GIB) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu, 80 * GIB))
    monkeypatch.setattr(subject, "free_memory", lambda: host)


def placement(recipe: Recipe) -> tuple[bool, list[str]]:
    """Whether the replay buffer is on the host, for observations of 1000 bytes, and the reported messages."""
    messages: list[str] = []
    return subject.fits_only_on_host(recipe, 1000, 3, CUDA, 1, Capture(CUDA, messages.append).fall_back), messages


def test_placement_follows_free_gpu_memory_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SACRecipe(buffer_size=2**20)  # 1023 bytes each: a little less than 1 GiB
    set_free_memory(int(1.2 * GIB), monkeypatch)
    assert placement(recipe) == (False, [])
    set_free_memory(GIB, monkeypatch)  # a tenth of it is kept free
    assert placement(recipe) == (
        True,
        [
            "The replay buffer is on the host, and each batch is copied to the GPU, which is slower: 1,048,576 steps "
            "need 1.0 GiB, but the GPU has 0.9 GiB free."
        ],
    )


def test_stacked_frames_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand stacks of four 84 × 84 images: 2.6 GiB whole, 0.7 GiB as frames."""
    layout = ObservationLayout.of(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    frames = Frames(replace(layout, frame_stack=4, stack_axes=(0,)))
    set_free_memory(GIB, monkeypatch)
    messages: list[str] = []
    arguments = DQNRecipe(buffer_size=100_000), layout.obs_bytes, 1, CUDA, 1, Capture(CUDA, messages.append).fall_back
    assert not subject.fits_only_on_host(*arguments, frames)
    assert messages == []
    assert subject.fits_only_on_host(*arguments)
    assert "need 2.6 GiB" in messages[0]


def test_buffer_that_fits_nowhere_is_rejected_with_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_memory(GIB, monkeypatch, host=10 * GIB)
    with pytest.raises(UsageError) as error:
        ExperienceReplay(SACRecipe(buffer_size=10**8), 1000, 3, CUDA, no_capture)
    most = int(0.9 * 10 * GIB) // 1023
    assert str(error.value) == (
        "A replay buffer of 100,000,000 steps needs 95.3 GiB, but cuda has 0.9 GiB free and the host has "
        f"9.0 GiB free; set --buffer-size to at most {most:,}."
    )


def test_prioritised_buffer_must_fit_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_memory(GIB, monkeypatch)
    with pytest.raises(UsageError) as error:
        ExperienceReplay(DQNRecipe(buffer_size=2**20, per=True), 1000, 3, CUDA, no_capture)
    assert str(error.value) == (
        "A prioritised replay buffer must be on the GPU: 1,048,576 steps need 1.0 GiB, but the GPU has "
        f"0.9 GiB free; set --buffer-size to at most {int(0.9 * GIB) // 1032:,}, or remove --per."
    )


# -- training runs -----------------------------------------------------------------------------------------------------


def train(algo: str, folder: Path, name: str, device: str, timesteps: int) -> unidle.TrainedRun:
    settings = {
        **SMALL,
        "algo": algo,
        "net_arch": (8,),
        "learning_starts": 48,
        "utd_ratio": 0.5,
        "timesteps": timesteps,
        "eval_every": 0,
        "overlap": "strict",
        "subproc": False,
        "tensorboard": False,
        "quiet": True,
    }
    # Else epsilon would decay more slowly in the longer run.
    settings |= {"exploration_fraction": 0.0} if algo == "dqn" else {}
    env = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "dqn": "CartPole-v1"}[algo]
    return unidle.train(env, preset=algo, runs_dir=str(folder), run_name=name, device=device, **settings)


def state_of(run: unidle.TrainedRun) -> dict[str, Any]:
    latest = RunFolder.open(run.path).latest()
    assert latest is not None
    state: dict[str, Any] = load_checkpoint(latest)["algo"]
    return state


@pytest.mark.usefixtures("_host_placement")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("algo", ["sac", "td3", "dqn"])
def test_run_with_host_buffer_resumes_bit_for_bit(
    algo: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = train(algo, tmp_path, "uninterrupted", device, timesteps=240)
    assert "The replay buffer is on the host" in capsys.readouterr().err
    first_half = train(algo, tmp_path, "first_half", device, timesteps=120)
    before = state_of(first_half)
    assert before["experience"]["updates"] == math.floor(0.5 * (120 - 48))
    after, expected = state_of(unidle.resume(first_half.path, timesteps=240, quiet=True)), state_of(uninterrupted)
    assert after["experience"]["updates"] == math.floor(0.5 * (240 - 48))
    for name, value in expected["policy"].items():
        assert torch.equal(value, after["policy"][name]), name
    assert any(not torch.equal(value, before["policy"][name]) for name, value in after["policy"].items())
