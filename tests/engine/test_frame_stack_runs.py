"""Frame stacks of images are stored once in replay buffers, which changes nothing that is learned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from image_envs import RandomImages
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.buffers.frames import Frames
from unidle.envs.frame_stack import FrameStack

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 4,
    "batch_size": 8,
    "net_arch": (8,),
    "timesteps": 96,
    "buffer_size": 40,
    "learning_starts": 24,
    "utd_ratio": 0.5,
    "frame_stack": 3,
    "eval_every": 0,
    "subproc": False,
    "tensorboard": False,
    "device": "cpu",
    "seed": 5,
    "quiet": True,
}


def env_of(algo: str) -> partial[RandomImages]:
    return partial(RandomImages, (10, 9, 3), continuous=algo == "sac")


@pytest.mark.parametrize("per", [False, True], ids=["uniform", "prioritised"])
@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_frames_stored_once_do_not_change_what_is_learned(
    algo: str, per: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring wraps around twice. Prioritised replay draws by cell, and cells differ, so there only sizes compare."""
    settings = {**SMALL, "preset": algo, "runs_dir": str(tmp_path), "n_step": 2, "per": per}
    buffers: list[Any] = []

    def see(context: unidle.CallbackContext) -> None:
        buffers.append(context.state()["algo"]["experience"]["memory"])

    once = unidle.train(env_of(algo), run_name="once", after_iteration=[see], **settings)
    frame = 10 * 9 * 3 + 2
    assert buffers[-1]["obs"].shape == ((40 // 2 + 2) * 2, frame)
    monkeypatch.setattr(Frames, "of", lambda layout: None)
    whole = unidle.train(env_of(algo), run_name="whole", after_iteration=[see], **settings)
    assert buffers[-1]["obs"].shape == (40, 3 * 10 * 9 * 3 + 6)
    if not per:
        states = [final_state(run.path)["algo"] for run in (once, whole)]
        for state in states:
            del state["experience"]["memory"]
        assert_same(*states)


class Failing(RandomImages):
    """Fails at some steps of a run, whereupon it is restarted and the episode ends, truncated, with the step before."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self._may_fail = seed not in (None, SMALL["seed"])  # not in the test steps before training
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        if self._may_fail and self.np_random.random() < 0.1:
            raise RuntimeError("as planned")
        return super().step(action)


def test_frames_stay_in_their_episodes_where_environments_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "preset": "dqn", "runs_dir": str(tmp_path), "timesteps": 120}
    once = unidle.train(Failing, run_name="once", **settings)
    assert max(record.get("faults/exception", 0) for record in once.records) > 5
    monkeypatch.setattr(Frames, "of", lambda layout: None)
    whole = unidle.train(Failing, run_name="whole", **settings)
    states = [final_state(run.path)["algo"] for run in (once, whole)]
    for state in states:
        del state["experience"]["memory"]
    assert_same(*states)


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_resumed_run_with_frame_stacks_equals_uninterrupted_run(algo: str, tmp_path: Path) -> None:
    settings = {**SMALL, "preset": algo, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env_of(algo), run_name="uninterrupted", **settings)
    unidle.train(env_of(algo), run_name="resumed", after_iteration=[StopAfter(7)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", env=env_of(algo), quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))


def test_buffer_that_was_not_saved_is_refilled_from_the_middle_of_episodes(tmp_path: Path) -> None:
    settings = {**SMALL, "preset": "dqn", "runs_dir": str(tmp_path)}
    unidle.train(env_of("dqn"), run_name="run", after_iteration=[StopAfter(7)], save_replay_buffer=False, **settings)
    resumed = unidle.resume(tmp_path / "run", env=env_of("dqn"), quiet=True)
    assert resumed.summary()["step"] == 96


def test_stacked_numbers_are_stored_as_before(tmp_path: Path) -> None:
    memory: list[Any] = []
    settings = {**SMALL, "preset": "dqn", "runs_dir": str(tmp_path)}
    unidle.train(
        "CartPole-v1",
        after_iteration=[lambda context: memory.append(context.state()["algo"]["experience"]["memory"])],
        **settings,
    )
    assert memory[-1]["obs"].shape == (40, 4 * 4 * 3)


def test_wrapper_around_frame_stack_keeps_whole_stacks(tmp_path: Path) -> None:
    """Another wrapper may change the stack, so its frames are not taken apart."""

    class Inverted(gymnasium.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return 255 - observation

    def wrapped() -> gymnasium.Env:
        return Inverted(FrameStack(RandomImages(), 3))

    memory: list[Any] = []
    unidle.train(
        wrapped,
        after_iteration=[lambda context: memory.append(context.state()["algo"]["experience"]["memory"])],
        **{**SMALL, "preset": "dqn", "frame_stack": 1, "runs_dir": str(tmp_path)},
    )
    assert memory[-1]["obs"].shape[1] == 3 * 10 * 9 * 3 + 6
