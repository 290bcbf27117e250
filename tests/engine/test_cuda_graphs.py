"""CUDA graph capture: captured functions equal eager ones, and failed captures fall back with a message."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import unidle
from unidle.algos.micro_batches import MicroBatches
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.cuda_graphs import Capture


def test_function_runs_eagerly_on_cpu_or_without_graphs() -> None:
    def function() -> None:
        pass

    assert Capture(torch.device("cpu"), print)("nothing", function, []) is function
    assert Capture(torch.device("cuda"), print, graphs=False)("nothing", function, []) is function


@pytest.mark.gpu
def test_warm_up_is_undone_and_replays_work_in_place() -> None:
    device = torch.device("cuda")
    total, step = torch.zeros(4, device=device), torch.ones(4, device=device)
    messages: list[str] = []
    add = Capture(device, messages.append)("adding", lambda: total.add_(step), [total])
    add()
    assert total.tolist() == [1.0] * 4
    step.fill_(5.0)  # a replay reads the current value
    add()
    add()
    assert total.tolist() == [11.0] * 4
    assert messages == []


@pytest.mark.gpu
def test_function_with_host_sync_runs_eagerly_with_one_message() -> None:
    device = torch.device("cuda")
    total = torch.zeros((), device=device)
    messages: list[str] = []
    capture = Capture(device, messages.append)

    def syncing() -> None:
        if total.item() >= 0:
            total.add_(1)

    run = capture("syncing", syncing, [total])
    for _ in range(3):
        run()
    assert total.item() == 3
    assert len(messages) == 1
    assert messages[0].startswith("syncing could not be captured as a CUDA graph and runs eagerly")
    assert "syncing" in capture.fallbacks


@pytest.mark.gpu
def test_failed_capture_leaves_default_generator_unchanged() -> None:
    device = torch.device("cuda")
    total = torch.zeros((), device=device)

    def syncing() -> None:
        total.add_(torch.rand((), device=device))
        total.item()

    torch.manual_seed(1)
    expected = torch.rand((), device=device)
    torch.manual_seed(1)
    run = Capture(device, lambda text: None)("syncing", syncing, [total])
    run()  # torch would raise here if the capture were still open
    assert total.item() == expected.item()


@pytest.mark.gpu
def test_failed_capture_leaves_no_memory_behind() -> None:
    device, side = torch.device("cuda"), torch.cuda.Stream()

    def failing() -> None:
        if torch.cuda.is_current_stream_capturing():
            side.wait_stream(torch.cuda.current_stream())  # never joined, so that torch cannot end the capture
            with torch.cuda.stream(side):
                torch.zeros(2**28, device=device)
            raise ValueError("planted")

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    run = Capture(device, lambda text: None)("failing", failing, [])
    run()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21


@pytest.mark.gpu
def test_capture_that_runs_out_of_memory_starts_over_with_micro_batches() -> None:
    device = torch.device("cuda")
    total, ones = torch.zeros((), device=device), torch.ones(64, device=device)
    messages: list[str] = []
    capture = Capture(device, messages.append)
    micro_batches = MicroBatches("Work", capture.fall_back)

    def work(count: int) -> None:
        if count < 4 and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("planted")
        for part in ones.chunk(count):
            total.add_(part.sum())

    run = capture("work", lambda: micro_batches(64, work), [total])
    run()
    run()
    assert total.item() == 128
    assert micro_batches.count == 4
    assert capture.fallbacks.keys() == {"Work"}, "captured, though split"


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
        ("Pendulum-v1", {"algo": "sac", "activation": "relu"}),  # Triton kernels
        ("Pendulum-v1", {"algo": "sac", "activation": "elu", "per": True}),  # plain PyTorch
        ("CartPole-v1", {"algo": "dqn", "per": True, "n_step": 3, "dueling": True}),
    ],
    ids=["sac", "plain PyTorch sac", "dqn"],
)
def test_captured_updates_equal_eager_updates_bit_for_bit(
    env: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(name: str) -> dict[str, Any]:
        run = unidle.train(
            env=env,
            n_envs=4,
            n_steps=8,
            batch_size=64,
            utd_ratio=0.4,  # uses the graphs of eight updates and of one
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
