"""A replay buffer that stores each frame once gives the samples of one that stores whole stacks, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from image_envs import DirectedEpisodes
from replay_buffers import CPU, GAMMA, seeded
from torch import Tensor

from unidle.buffers.frame_replay import FrameReplay
from unidle.buffers.frames import Frames
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay, Transitions
from unidle.envs.frame_stack import FrameStack
from unidle.errors import UsageError
from unidle.spaces.observations import ObservationLayout


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


WITH_MASK = spaces.Dict(
    {"camera": image(9, 8, 1), "speed": spaces.Box(0, 255, (3,)), "action_mask": spaces.MultiBinary(4)}
)
SPACES = {
    "no channels": image(8, 9),
    "channels last": image(8, 9, 3),
    "channels first": image(2, 8, 9),
    "as many channels as pixels once stacked": image(3, 9, 12),
    "Dict with a mask": WITH_MASK,
}


def layout_of(space: spaces.Space, n: int) -> ObservationLayout:
    env = FrameStack(DirectedEpisodes(space, 0), n)
    return env.described_in(ObservationLayout.of(env.observation_space, 4 if space is WITH_MASK else 0))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", SPACES)
def test_frames_are_taken_apart_and_put_together(kind: str, n: int) -> None:
    """Along the axis of the wrapper: the frames of a full stack are the last n observations."""
    layout, env = layout_of(SPACES[kind], n), FrameStack(DirectedEpisodes(SPACES[kind], 0), n)
    frames, collector = Frames(layout), Collector([env], layout)
    seen = [collector.obs, *(collector.step([0])["next_obs"] for _ in range(n))]
    stacks = frames.of_stacks(seen[-1])
    assert torch.equal(frames.stacked(stacks), seen[-1])
    without_mask = slice(0, frames.frame_bytes - 8 if layout.mask_width else None)  # the mask is not stacked
    for back in range(n):
        newest = frames.newest(seen[-1 - back])
        assert torch.equal(stacks[:, n - 1 - back, without_mask], newest[:, without_mask])
    assert frames.frame_bytes < layout.obs_bytes


def test_numbers_alone_are_stored_as_whole_stacks() -> None:
    assert Frames.of(layout_of(spaces.Box(0, 255, (3,)), 4)) is None
    assert Frames.of(ObservationLayout.of(image(8, 9, 4))) is None
    assert Frames.of(layout_of(image(8, 9, 1), 4)) is not None


class Collector:
    """Steps environments as a rollout does, in packed observations."""

    def __init__(self, envs: list[FrameStack], layout: ObservationLayout) -> None:
        self.envs, self._layout = envs, layout
        self.obs = self._packed([env.reset()[0] for env in envs])

    def _packed(self, observations: list[Any]) -> Tensor:
        obs = np.stack([self._layout.pack(observation) for observation in observations])
        for mask, observation in zip(self._layout.mask_view(obs), observations):
            mask[:] = observation["action_mask"] if len(mask) else 0
        return torch.from_numpy(obs)

    def step(self, ends: list[int]) -> dict[str, Tensor]:
        """The arguments of `add`."""
        next_obs, finals, outcomes = [], [], []
        for env, end in zip(self.envs, ends):
            observation, reward, terminated, truncated, _ = env.step(end)
            outcomes.append((reward, terminated, truncated))
            finals.append(observation)
            next_obs.append(env.reset()[0] if terminated or truncated else observation)
        rewards, terminated, truncated = (torch.tensor(column) for column in zip(*outcomes))
        self.obs = self._packed(next_obs)
        actions = torch.tensor(ends, dtype=torch.float32).unsqueeze(1)
        return {
            "actions": actions,
            "rewards": rewards.float(),
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": self.obs,
            "final_obs": self._packed(finals),
        }

    def restart(self, which: list[bool]) -> tuple[Tensor, Tensor]:
        """The arguments of `start` after these environments were restarted in the middle of an episode."""
        for index, (env, restarted) in enumerate(zip(self.envs, which)):
            if restarted:
                self.obs[index] = self._packed([env.reset()[0]])
        return self.obs, torch.tensor(which)


Step = tuple[str, list[Any]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, int, list[Step]]:
    """(space, n, n_steps, places, steps before the first, steps and restarts); rings wrap around several times."""
    n_envs, n_steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    end = st.sampled_from([0] * draw(st.sampled_from([1, 8, 40])) + [1, 2, 3])
    step = st.tuples(st.just("step"), st.lists(end, min_size=n_envs, max_size=n_envs))
    restart = st.tuples(st.just("restart"), st.lists(st.booleans(), min_size=n_envs, max_size=n_envs))
    steps = draw(st.lists(st.one_of(step, step, step, restart), min_size=1, max_size=50))
    kind, n = draw(st.sampled_from(sorted(SPACES))), draw(st.integers(2, 5))
    return kind, n, n_steps, n_steps + 2 + draw(st.integers(0, 9)), draw(st.integers(0, 6)), steps


def both_buffers(layout: ObservationLayout, n_envs: int, places: int, n_steps: int) -> tuple[FrameReplay, Replay]:
    capacity = places * n_envs
    return (
        FrameReplay(capacity, n_envs, Frames(layout), 1, CPU, GAMMA, n_steps),
        Replay(capacity, n_envs, layout.obs_bytes, 1, CPU, GAMMA, n_steps),
    )


def assert_same_samples(frames: FrameReplay, whole: Replay) -> None:
    ours, expected = (buffer.sample(200, seeded(1)) for buffer in (frames, whole))
    for field in fields(Transitions):
        if field.name != "index":  # cells, of rings of different lengths
            assert torch.equal(getattr(ours, field.name), getattr(expected, field.name)), field.name


@given(cases())
def test_samples_equal_those_of_whole_stacks(case: tuple[str, int, int, int, int, list[Step]]) -> None:
    """Also when the buffer begins in the middle of an episode, and when environments are restarted."""
    kind, n, n_steps, places, before, steps = case
    layout, n_envs = layout_of(SPACES[kind], n), len(steps[0][1])
    collector = Collector([FrameStack(DirectedEpisodes(SPACES[kind], seed), n) for seed in range(n_envs)], layout)
    for _ in range(before):
        collector.step([0] * n_envs)
    frames, whole = buffers = both_buffers(layout, n_envs, places, n_steps)
    for buffer in buffers:
        buffer.start(collector.obs, torch.full((n_envs,), before == 0))
    for number, (what, each) in enumerate(steps):
        if what == "restart":
            started = collector.restart(each)
            for buffer in buffers:
                buffer.start(*started)
        else:
            step = collector.step(each)
            for buffer in buffers:
                buffer.add(**step)
        assert frames.count == whole.count
        if frames.count and (number % 8 == 0 or number == len(steps) - 1):
            assert_same_samples(frames, whole)


def filled(n_steps: int = 60, places: int = 9) -> tuple[FrameReplay, Replay, Collector]:
    layout = layout_of(SPACES["channels last"], 4)
    collector = Collector([FrameStack(DirectedEpisodes(SPACES["channels last"], seed), 4) for seed in range(3)], layout)
    frames, whole = both_buffers(layout, 3, places, 1)
    rng = np.random.default_rng(0)
    for buffer in (frames, whole):
        buffer.start(collector.obs)
    for _ in range(n_steps):
        step = collector.step(rng.choice(4, 3, p=[0.7, 0.1, 0.1, 0.1]).tolist())
        for buffer in (frames, whole):
            buffer.add(**step)
    return frames, whole, collector


def test_loaded_state_gives_same_samples() -> None:
    frames, whole, collector = filled()
    layout = layout_of(SPACES["channels last"], 4)
    loaded, _ = both_buffers(layout, 3, 9, 1)
    loaded.load_state_dict(frames.state_dict())
    for buffer in (loaded, whole):
        buffer.start(collector.obs, torch.tensor([False] * 3))
    step = collector.step([0, 2, 1])
    for buffer in (loaded, whole):
        buffer.add(**step)
    assert_same_samples(loaded, whole)


def test_whole_stacks_of_an_earlier_version_are_refused_in_one_sentence() -> None:
    frames, whole, _ = filled()
    with pytest.raises(UsageError, match="stored whole stacks of frames; resume with that version"):
        frames.load_state_dict(whole.state_dict())


def test_prioritised_buffer_samples_only_what_is_stored() -> None:
    layout = layout_of(SPACES["no channels"], 3)
    collector = Collector([FrameStack(DirectedEpisodes(SPACES["no channels"], seed), 3) for seed in range(2)], layout)
    frames, whole = both_buffers(layout, 2, 8, 1)
    buffers = Prioritised(frames, 0.6, 0.4), Prioritised(whole, 0.6, 0.4)
    rng = np.random.default_rng(1)
    for buffer in buffers:
        buffer.start(collector.obs)
    for number in range(40):
        step = collector.step(rng.choice(4, 2, p=[0.7, 0.1, 0.1, 0.1]).tolist())
        for buffer in buffers:
            buffer.add(**step)
        if number % 7 == 6:
            started = collector.restart([True, False])
            for buffer in buffers:
                buffer.start(*started)
        for buffer in buffers:
            assert torch.equal(buffer.tree.leaves > 0, buffer.replay.has_transition)
        ours, expected = (
            {bytes(pair) for pair in torch.cat((batch.obs, batch.next_obs), 1).numpy()}
            for batch in (buffer.sample(300, seeded()) for buffer in buffers)
            if (batch.weights > 0).all()
        )
        assert ours == expected


def test_memory_is_that_of_frames() -> None:
    frames, whole, _ = filled(n_steps=1, places=1000)
    assert frames.obs.nbytes < whole.obs.nbytes / 3.9
    assert FrameReplay.bytes_per_transition(216, 1) == Replay.bytes_per_transition(216, 1) + 2
