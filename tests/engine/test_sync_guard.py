"""On a GPU nothing in an iteration makes the host wait but the event that says actions have arrived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import unidle
from unidle.engine.collect.inference import Inference
from unidle.engine.collect.rollout_slot import RolloutSlot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_iterations_wait_for_nothing_but_the_actions(
    overlap: str, env: str, recurrent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: Counter[str] = Counter()
    watching = False

    def counted(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def count(*arguments: Any, **settings: Any) -> Any:
            waits[label] += watching
            return original(*arguments, **settings)

        monkeypatch.setattr(owner, name, count)

    counted(torch.cuda.Event, "synchronize", "event")
    counted(torch.cuda.Stream, "synchronize", "stream")
    counted(torch.cuda, "synchronize", "device")
    counted(Inference, "launch", "inferences")
    slots: list[RolloutSlot] = []
    original_init = RolloutSlot.__init__

    def remember(self: RolloutSlot, *arguments: Any, **settings: Any) -> None:
        original_init(self, *arguments, **settings)
        slots.append(self)

    monkeypatch.setattr(RolloutSlot, "__init__", remember)
    iterations = 0

    def guard(context: unidle.CallbackContext) -> None:
        nonlocal watching, iterations
        iterations += 1
        watching = 3 <= iterations < 8
        for slot in slots:
            service, notes = slot.inference, slot.staging
            there, back = (service._block_obs, service._positions, service._starts), service._staged
            for memory in (*there, back, service._block_actions):
                assert memory.is_pinned()
            for noted in (notes.outcomes, notes.starts, notes.last_obs):
                assert torch.from_numpy(noted).is_pinned()
        torch.cuda.set_sync_debug_mode("error" if watching else "default")

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
    # One for each inference; and two per iteration: for the metrics of what was learned, and at once afterwards, where
    # there is nothing to wait for, for the device's clock to be read.
    assert waits["event"] == waits["inferences"] + 2 * 5
    assert waits["inferences"] > 5
