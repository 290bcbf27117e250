"""A memory that there is no room for on the GPU: what it holds, which batches arrive, and what the user is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unidle
from unidle.algos.capturing import as_it_is
from unidle.algos.experience_replay import ExperienceReplay, Updates
from unidle.buffers import placement as subject
from unidle.buffers.prefetch import Prefetch
from unidle.buffers.replay import Replay, Transitions
from unidle.buffers.rollout import Rollout
from unidle.config import DQNRecipe, Recipe, SACRecipe, recipe_for
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint
from unidle.engine.cuda_graphs import Capture
from unidle.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
SMALL: dict[str, Any] = {"algo": "sac", "n_envs": 3, "n_steps": 8, "batch_size": 16, "buffer_size": 120}


@pytest.fixture
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, so that the memory lies on the host even where the device is the host."""
    monkeypatch.setattr(subject, "choose_place", lambda *sizes: "host")


def tasks_of(obs: Tensor) -> Tensor:
    return obs[:, 0].long() % 3


def fragment(seed: int) -> Rollout:
    """8 steps of 3 environments, in which anything may happen."""
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
def test_it_holds_what_one_on_the_device_does(n_tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_for(**SMALL, n_tasks=n_tasks)
    held = []
    for place in ("device", "host"):
        monkeypatch.setattr(subject, "choose_place", lambda *sizes, place=place: place)
        experience = ExperienceReplay(
            recipe, 16, 2, CPU, as_it_is, n_tasks=n_tasks, tasks_of=tasks_of if n_tasks > 1 else None
        )
        for number in range(7):
            experience.store(fragment(number))
        held.append(experience.state_dict())
        assert isinstance(experience.sampler, Prefetch) == (place == "host")
    for name, value in held[0]["memory"].items():
        assert torch.equal(value, held[1]["memory"][name]), name
    assert held[0]["memory"]["entered"].sum() == 7 * 24


@pytest.mark.usefixtures("_no_room")
def test_each_update_has_a_batch_of_its_own_with_the_newest_steps_in_it() -> None:
    recipe = recipe_for(**SMALL, utd_ratio=1.5, learning_starts=24)
    experience = ExperienceReplay(recipe, 16, 2, CPU, as_it_is)
    seen: list[Transitions] = []

    def update(generator: torch.Generator, phase: int) -> None:
        batch = experience.sampler.sample(16, generator)
        seen.append(Transitions(*(t.clone() for t in batch.tensors())))

    updates = Updates(update, [], CPU, as_it_is)
    for number in range(3):
        seen.clear()
        newest = fragment(number)
        pieces = list(experience.store_and_update(newest, updates, torch.Generator().manual_seed(number)))
        assert len(seen) == (36 if number else 0)  # nothing is sent that is not due
        assert len(pieces) == len(seen)  # environments may be served after each
        replay = experience.buffer
        assert isinstance(replay, Replay)
        for batch in seen:
            for mine, theirs in zip(batch.tensors(), replay.at(batch.index).tensors()):
                assert torch.equal(mine, theirs)
        assert len({tuple(batch.index.tolist()) for batch in seen}) == len(seen)
        if seen:
            drawn = torch.cat([batch.obs for batch in seen]).view(torch.int64)[:, 0]
            assert torch.isin(newest.obs[1:-1].flatten(0, 1).view(torch.int64)[:, 0], drawn).all()


# -- what the user is told ---------------------------------------------------------------------------------------------


def on_a_gpu_with(free: int, monkeypatch: pytest.MonkeyPatch, host: int = 10 * GIB) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(subject, "free_memory", lambda: host)


def placed(recipe: Recipe) -> tuple[bool, list[str]]:
    """Whether its memory lies apart, with rows of 1000 bytes, and what is said about it."""
    said: list[str] = []
    return subject.lies_on_host(recipe, 1000, 3, CUDA, 1, Capture(CUDA, said.append).fall_back), said


def test_the_numbers_decide_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SACRecipe(buffer_size=2**20)  # of 1023 bytes each: a little less than 1 GiB
    on_a_gpu_with(int(1.2 * GIB), monkeypatch)
    assert placed(recipe) == (False, [])
    on_a_gpu_with(GIB, monkeypatch)  # of which a tenth is left to the rest
    assert placed(recipe) == (
        True,
        [
            "The replay buffer is on the host, and each batch is copied to the GPU, which is slower: 1,048,576 steps "
            "need 1.0 GiB, but the GPU has 0.9 GiB free."
        ],
    )


def test_what_fits_nowhere_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu_with(GIB, monkeypatch, host=10 * GIB)
    with pytest.raises(UsageError) as error:
        ExperienceReplay(SACRecipe(buffer_size=10**8), 1000, 3, CUDA, as_it_is)
    most = int(0.9 * 10 * GIB) // 1023
    assert str(error.value) == (
        "A replay buffer of 100,000,000 steps needs 95.3 GiB, but cuda has 0.9 GiB free and the host has "
        f"9.0 GiB free; set --buffer-size to at most {most:,}."
    )


def test_priorities_must_lie_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu_with(GIB, monkeypatch)
    with pytest.raises(UsageError) as error:
        ExperienceReplay(DQNRecipe(buffer_size=2**20, per=True), 1000, 3, CUDA, as_it_is)
    assert str(error.value) == (
        "A prioritised replay buffer must be on the GPU: 1,048,576 steps need 1.0 GiB, but the GPU has "
        f"0.9 GiB free; set --buffer-size to at most {int(0.9 * GIB) // 1032:,}, or remove --per."
    )


# -- whole runs --------------------------------------------------------------------------------------------------------


def trained(algo: str, folder: Path, name: str, device: str, timesteps: int) -> unidle.TrainedRun:
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
    settings |= {"exploration_fraction": 0.0} if algo == "dqn" else {}  # or it would fall more slowly in a longer run
    env = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "dqn": "CartPole-v1"}[algo]
    return unidle.train(env, preset=algo, runs_dir=str(folder), run_name=name, device=device, **settings)


def state_of(run: unidle.TrainedRun) -> dict[str, Any]:
    latest = RunFolder.open(run.path).latest()
    assert latest is not None
    state: dict[str, Any] = load_checkpoint(latest)["algo"]
    return state


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("algo", ["sac", "td3", "dqn"])
def test_a_run_learns_from_it_goes_on_from_it_and_says_so(
    algo: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(algo, tmp_path, "whole", device, timesteps=240)
    assert "The replay buffer is on the host" in capsys.readouterr().err
    part = trained(algo, tmp_path, "part", device, timesteps=120)
    before = state_of(part)
    assert before["experience"]["updates"] == math.floor(0.5 * (120 - 48))
    after, expected = state_of(unidle.resume(part.path, timesteps=240, quiet=True)), state_of(whole)
    assert after["experience"]["updates"] == math.floor(0.5 * (240 - 48))
    for name, value in expected["policy"].items():
        assert torch.equal(value, after["policy"][name]), name
    assert any(not torch.equal(value, before["policy"][name]) for name, value in after["policy"].items())
