"""On a GPU, the host waits in an iteration only for the event that signals that actions have arrived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from image_envs import RandomImages

import unidle
from unidle.engine.collect.inference import Inference
from unidle.engine.collect.rollout_slot import RolloutSlot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1", RandomImages])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_iterations_wait_only_for_actions(
    overlap: str, env: Any, recurrent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: Counter[str] = Counter()
    is_counting = False

    def count_calls(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def count(*arguments: Any, **settings: Any) -> Any:
            waits[label] += is_counting
            return original(*arguments, **settings)

        monkeypatch.setattr(owner, name, count)

    count_calls(torch.cuda.Event, "synchronize", "event")
    count_calls(torch.cuda.Stream, "synchronize", "stream")
    count_calls(torch.cuda, "synchronize", "device")
    count_calls(Inference, "launch", "inferences")
    slots: list[RolloutSlot] = []
    original_init = RolloutSlot.__init__

    def record_slot(self: RolloutSlot, *arguments: Any, **settings: Any) -> None:
        original_init(self, *arguments, **settings)
        slots.append(self)

    monkeypatch.setattr(RolloutSlot, "__init__", record_slot)
    iterations = 0

    def guard(context: unidle.CallbackContext) -> None:
        nonlocal is_counting, iterations
        iterations += 1
        is_counting = 3 <= iterations < 8
        for slot in slots:
            inference, staging = slot.inference, slot.staging
            to_gpu = (inference._block_obs, inference._positions, inference._starts)
            for memory in (*to_gpu, inference._staged, inference._block_actions):
                assert memory.is_pinned()
            for array in (staging.outcomes, staging.starts, staging.last_obs):
                assert torch.from_numpy(array).is_pinned()
        torch.cuda.set_sync_debug_mode("error" if is_counting else "default")

    try:
        unidle.train(
            env,
            preset="classic",
            overlap=overlap,
            recurrent=recurrent,
            normalize_obs=True,
            normalize_reward=True,
            target_kl=0.05,
            n_envs=8,
            n_steps=64,
            batch_size=128,
            n_epochs=2,
            timesteps=10 * 512,
            workers=2,
            eval_every=0,
            checkpoint_every=10**9,
            device="cuda",
            tensorboard=False,
            quiet=True,
            runs_dir=str(tmp_path),
            after_iteration=[guard],
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert iterations == 10
    assert len(slots) == (2 if overlap == "strict" else 1)
    assert waits["stream"] == waits["device"] == 0
    # One per inference and two per iteration: for the metrics of the update, and right after it, without any wait, for
    # reading the device's clock.
    assert waits["event"] == waits["inferences"] + 2 * 5
    assert waits["inferences"] >= 5  # the first of each rollout; the loop in C launches others, and only queries events
