"""Replay buffers in files of their own."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_envs import Walk

from unidle.errors import UsageError
from unidle.sb3 import DQN, PPO, make_vec_env
from unidle.sb3.common.callbacks import CheckpointCallback

SMALL: dict[str, Any] = {"learning_starts": 8, "buffer_size": 64, "batch_size": 4, "seed": 3, "device": "cpu"}


def dqn(**changes: Any) -> DQN:
    return DQN("MlpPolicy", make_vec_env(Walk, 1), **{**SMALL, **changes})


@pytest.mark.parametrize("name", ["replay", "replay.pkl", "deep/folder/replay"])
def test_loaded_model_continues_with_the_replay_buffer(name: str, tmp_path: Path) -> None:
    model = dqn().learn(32)
    assert model.replay_buffer.size() == 32
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / name)
    loaded = DQN.load(tmp_path / "model", env=make_vec_env(Walk, 1))
    assert loaded.replay_buffer.size() == 0
    loaded.load_replay_buffer(tmp_path / name)
    assert loaded.replay_buffer.size() == 32
    before = model._state()["algo"]["experience"]["memory"]
    after = loaded._state()["algo"]["experience"]["memory"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded.learn(16, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 48


def test_replay_buffer_goes_through_an_open_file() -> None:
    file = io.BytesIO()
    dqn().learn(32).save_replay_buffer(file)
    file.seek(0)
    model = dqn()
    model.load_replay_buffer(file)
    assert model.replay_buffer.size() == 32
    assert not model.replay_buffer.full


def test_replay_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    dqn().learn(32).save_replay_buffer(tmp_path / "replay")
    model = dqn(buffer_size=32)
    model.load_replay_buffer(tmp_path / "replay")
    with pytest.raises(UsageError, match="replay buffer has"):
        model.learn(8)


def test_file_that_is_no_replay_buffer_is_refused_without_unpickling_it(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / "theirs.pkl").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="is not a replay buffer of unidle"):
        dqn().load_replay_buffer(tmp_path / "theirs.pkl")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ValueError, match="There is no replay buffer"):
        dqn().load_replay_buffer(tmp_path / "missing")


def test_checkpoints_may_have_the_replay_buffer(tmp_path: Path) -> None:
    dqn().learn(32, CheckpointCallback(16, str(tmp_path), "a", save_replay_buffer=True))
    names = sorted(path.name for path in tmp_path.iterdir())
    buffers = ["a_replay_buffer_16_steps.pkl", "a_replay_buffer_32_steps.pkl"]
    assert names == ["a_16_steps.zip", "a_32_steps.zip", *buffers]


def test_ppo_has_no_replay_buffer() -> None:
    model = PPO("MlpPolicy", Walk(), n_steps=16, batch_size=16)
    assert not hasattr(model, "replay_buffer")
    with pytest.raises(UsageError, match="PPO has no replay buffer"):
        model.save_replay_buffer("replay")
