"""Captured functions do what the function does, and say so when they cannot be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unidle
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint
from unidle.engine.cuda_graphs import Capture


def test_on_a_cpu_or_without_graphs_a_function_stays_as_it_is() -> None:
    def function() -> None:
        pass

    assert Capture(torch.device("cpu"), print)("nothing", function, []) is function
    assert Capture(torch.device("cuda"), print, graphs=False)("nothing", function, []) is function


@pytest.mark.gpu
def test_the_warm_up_leaves_no_trace_and_replays_work_in_place() -> None:
    device = torch.device("cuda")
    total, step = torch.zeros(4, device=device), torch.ones(4, device=device)
    told: list[str] = []
    add = Capture(device, told.append)("adding", lambda: total.add_(step), [total])
    add()
    assert total.tolist() == [1.0] * 4
    step.fill_(5.0)  # a replay reads what the tensor holds now
    add()
    add()
    assert total.tolist() == [11.0] * 4
    assert told == []


@pytest.mark.gpu
def test_a_function_that_asks_the_host_runs_eagerly_and_the_reason_is_told_once() -> None:
    device = torch.device("cuda")
    total = torch.zeros((), device=device)
    told: list[str] = []
    capture = Capture(device, told.append)

    def asking() -> None:
        if total.item() >= 0:
            total.add_(1)

    run = capture("asking", asking, [total])
    for _ in range(3):
        run()
    assert total.item() == 3
    assert len(told) == 1
    assert told[0].startswith("asking could not be captured as a CUDA graph and runs eagerly")
    assert "asking" in capture.fallbacks


@pytest.mark.gpu
def test_a_capture_that_failed_leaves_the_usual_generator_as_it_was() -> None:
    device = torch.device("cuda")
    total = torch.zeros((), device=device)

    def asking() -> None:
        total.add_(torch.rand((), device=device))
        total.item()

    torch.manual_seed(1)
    expected = torch.rand((), device=device)
    torch.manual_seed(1)
    run = Capture(device, lambda text: None)("asking", asking, [total])
    run()  # torch refuses to draw where it takes a capture for unfinished
    assert total.item() == expected.item()


@pytest.mark.gpu
@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_captured_training_equals_eager_training_bit_for_bit(
    recurrent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(name: str) -> dict[str, torch.Tensor]:
        run = unidle.train(
            env="Pendulum-v1",
            preset="classic",
            n_envs=8,
            n_steps=32,
            batch_size=64,
            n_epochs=4,
            timesteps=2560,
            recurrent=recurrent,
            recurrent_size=16,
            normalize_obs=True,
            target_kl=0.05,
            device="cuda",
            eval_every=0,
            tensorboard=False,
            quiet=True,
            runs_dir=str(tmp_path),
            run_name=name,
        )
        latest = RunFolder.open(run.path).latest()
        assert latest is not None
        policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
        return policy

    captured = weights("captured")
    monkeypatch.setattr(Capture, "__call__", lambda self, name, function, *_, **__: function)
    eager = weights("eager")
    assert [name for name in eager if not torch.equal(eager[name], captured[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Pendulum-v1", {"algo": "sac", "activation": "relu"}),  # by kernels of its own
        ("Pendulum-v1", {"algo": "sac", "activation": "elu", "per": True}),  # the plain way
        ("CartPole-v1", {"algo": "dqn", "per": True, "n_step": 3, "dueling": True}),
    ],
    ids=["sac", "plain sac", "dqn"],
)
def test_captured_updates_equal_eager_ones_bit_for_bit(
    env: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(name: str) -> dict[str, Any]:
        run = unidle.train(
            env=env,
            n_envs=4,
            n_steps=8,
            batch_size=64,
            utd_ratio=0.4,  # so that graphs of eight and of one take turns
            learning_starts=100,
            buffer_size=2000,
            timesteps=1280,
            net_arch=(32, 32),
            device="cuda",
            eval_every=0,
            tensorboard=False,
            quiet=True,
            runs_dir=str(tmp_path),
            run_name=name,
            **settings,
        )
        latest = RunFolder.open(run.path).latest()
        assert latest is not None
        algo: dict[str, Any] = load_checkpoint(latest)["algo"]
        return algo

    captured = state("captured")
    monkeypatch.setattr(Capture, "__call__", lambda self, name, function, *_, **__: function)
    eager = state("eager")
    for part in captured:
        torch.testing.assert_close(captured[part], eager[part], rtol=0, atol=0)
