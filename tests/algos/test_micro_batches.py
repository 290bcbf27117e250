"""Out of memory during an update: minibatches are split into micro-batches, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run
from torch.testing import assert_close

import unidle
from unidle.algos.micro_batches import MicroBatches
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.kernels.dispatch import no_report
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.critics import Critics
from unidle.nn.q_policy import QPolicy

SMALL: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 32,
    "batch_size": 64,
    "net_arch": (16, 16),
    "timesteps": 512,
    "eval_every": 0,
    "tensorboard": False,
    "device": "cpu",
}


def limit_batch_size(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, max_size: int) -> None:
    """From now on, `kind.method` runs out of memory for more than `max_size` observations with gradients."""
    original: Callable[..., Any] = getattr(kind, method)

    def limited(self: Any, inputs: torch.Tensor, *more: Any) -> Any:
        if torch.is_grad_enabled() and len(inputs) > max_size:
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {len(inputs)} observations.")
        return original(self, inputs, *more)

    monkeypatch.setattr(kind, method, limited)


def final_weights(run: unidle.TrainedRun) -> dict[str, torch.Tensor]:
    latest = RunFolder.open(run.path).latest()
    assert latest is not None
    policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return policy


def micro_batch_counts(run: unidle.TrainedRun) -> list[float]:
    return [record["train/micro_batches"] for record in run.records if record["kind"] == "iteration"]


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"normalize_advantage": False, "ent_coef": 0.01, "clip_range_vf": 0.1},
        {"recurrent": "gru", "n_steps": 8, "batch_size": 16},
        {"overlap": "strict"},
    ],
    ids=["plain", "clipped values, entropy", "gru", "strict overlap"],
)
def test_micro_batches_add_up_to_full_gradient_and_metrics(recipe: dict[str, Any]) -> None:
    run = small_run("Pendulum-v1", n_envs=4, **recipe)
    try:
        rollout = run.collect()
        batch = run.algo.prepare(rollout, run.policy if "overlap" in recipe else None)
        order = torch.randperm(len(batch.obs))[:7]
        logged = run.algo.ops.gradient(batch, order)
        whole = run.algo.parameters.grad.clone()
        assert whole.abs().max() > 0
        run.algo.ops.micro_batches.count = min(
            3, len(order)
        )  # 3 does not divide 7, so the micro-batches differ in size
        split_logged = run.algo.ops.gradient(batch, order)
        assert_close(run.algo.parameters.grad, whole, rtol=1e-4, atol=1e-6)
        assert_close(split_logged, logged, rtol=1e-4, atol=1e-6)
    finally:
        run.envs.close()


@pytest.mark.parametrize(
    ("algo", "env", "kind", "method"),
    [
        ("ppo", "Pendulum-v1", ActorCritic, "forward"),
        ("sac", "Pendulum-v1", Critics, "forward"),
        ("sac", "CartPole-v1", Critics, "forward"),
        ("td3", "Pendulum-v1", Critics, "forward"),
        ("dqn", "CartPole-v1", QPolicy, "values"),
    ],
    ids=["ppo", "sac", "sac discrete", "td3", "dqn"],
)
def test_training_continues_in_micro_batches_when_out_of_memory(
    algo: str,
    env: str,
    kind: type,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {**SMALL, "algo": algo, "runs_dir": str(tmp_path), "preset": "classic" if algo == "ppo" else algo}
    if algo != "ppo":
        settings |= {"learning_starts": 64, "buffer_size": 2000, "utd_ratio": 0.1}
    else:
        settings |= {"activation": "elu"}  # no kernel supports it
    plain = unidle.train(env, **settings, quiet=True)
    assert set(micro_batch_counts(plain)) == {1.0}
    capsys.readouterr()
    limit_batch_size(monkeypatch, kind, method, 20)
    split = unidle.train(env, **settings, quiet=True)
    stderr = capsys.readouterr().err
    assert stderr.count("A minibatch does not fit in memory and is split into micro-batches") == 1
    assert "out of memory. Tried to allocate 64 observations." in stderr
    assert micro_batch_counts(split)[-1] == 4.0  # of 64 observations: 16 fit, 32 do not
    before, after = final_weights(plain), final_weights(split)
    assert_close(after, before, rtol=5e-3, atol=5e-4)


def test_rollout_evaluation_is_split_when_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run("Pendulum-v1")
    try:
        rollout = run.collect()
        values = run.algo.prepare(rollout).values
        original = ActorCritic.forward

        def limited(self: ActorCritic, obs: torch.Tensor, *more: Any) -> Any:
            if len(obs) > 8:
                raise torch.OutOfMemoryError("out of memory")
            return original(self, obs, *more)

        monkeypatch.setattr(ActorCritic, "forward", limited)
        assert_close(run.algo.prepare(rollout).values, values)
        assert run.algo.ops.micro_batches.count == 1  # the update itself may still fit
    finally:
        run.envs.close()


def test_out_of_memory_for_one_observation_is_raised() -> None:
    micro_batches = MicroBatches("Work", no_report)
    tried: list[int] = []

    def work(count: int) -> None:
        tried.append(count)
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        micro_batches(3, work)
    assert tried == [1, 2, 3]


@pytest.mark.gpu
def test_gpu_with_little_memory_trains_in_micro_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "preset": "classic",
        "device": "cuda",
        "n_envs": 16,
        "n_steps": 4096,
        "batch_size": 65536,
        "n_epochs": 1,
        "net_arch": (1024, 1024),
        "timesteps": 2 * 65536,
        "runs_dir": str(tmp_path),
        "quiet": True,
    }
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((held + 900 * 2**20) / total)  # the whole minibatch needs more
        run = unidle.train("Pendulum-v1", **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert micro_batch_counts(run)[-1] > 1
    assert run.records[-1]["step"] == 2 * 65536
    assert "runs eagerly" not in capsys.readouterr().err
