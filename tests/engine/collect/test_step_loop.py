"""The loop of collecting in C: the same rollouts as without it, in far fewer returns to Python."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from c_loop_on_cpu import CpuLauncher, use_c_loop
from resumed_runs import assert_same, final_state

import unidle
from unidle.engine.collect import host, step_loop
from unidle.errors import ResumableError
from unidle.metrics.jsonl import read_records

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 6,
    "n_steps": 64,
    "batch_size": 96,
    "n_epochs": 1,
    "net_arch": (16,),
    "timesteps": 6 * 64 * 4,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
    "workers": 3,
    "slices": 2,
}
# Pendulum's episodes have 200 steps; CartPole's end at nearly every step of six environments.
RUNS = pytest.mark.parametrize(
    ("env", "overlap"),
    [("Pendulum-v1", "off"), ("Pendulum-v1", "strict"), ("CartPole-v1", "off"), ("CartPole-v1", "strict")],
)


def train(folder: Path, name: str, env: str, overlap: str, **settings: Any) -> unidle.TrainedRun:
    return unidle.train(env, runs_dir=str(folder), run_name=name, overlap=overlap, **{**SMALL, **settings})


@RUNS
def test_weights_are_those_of_a_run_without_it(
    env: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_python = train(tmp_path, "python", env, overlap)
    [launcher] = _launchers(monkeypatch, lambda: train(tmp_path, "c", env, overlap))
    assert launcher.launches > 0
    assert_same(final_state(tmp_path / "c"), final_state(in_python.path))


def test_most_steps_of_long_episodes_return_to_python_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = []
    act = host.HostCollector._act
    monkeypatch.setattr(host.HostCollector, "_act", lambda *given: acts.append(1) or act(*given))
    [launcher] = _launchers(
        monkeypatch, lambda: train(tmp_path, "c", "Pendulum-v1", "off", n_steps=100, batch_size=100, timesteps=2400)
    )
    # Three rollouts after the first. In Python: their first and last steps, and that at which an episode ends.
    assert launcher.launches > 200
    assert len(acts) < 100 * 6 + 3 * 3 * 6  # the first rollout is collected in Python


def test_group_trains_each_run_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "workers": 1, "runs_dir": str(tmp_path)}
    alone = [unidle.train("Pendulum-v1", run_name=f"alone-{seed}", seed=seed, **settings) for seed in (0, 1)]
    launchers = _launchers(monkeypatch, lambda: unidle.train("Pendulum-v1", run_name="group", seeds=[0, 1], **settings))
    assert [launcher.launches > 0 for launcher in launchers] == [True, True]
    for seed, run in enumerate(alone):
        ours, theirs = final_state(tmp_path / "group" / f"seed-{seed}"), final_state(run.path)
        del ours["random"], theirs["random"]  # the generators of the process; nothing here draws from them
        assert_same(ours, theirs)


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_resumed_run_uses_it_and_equals_an_undisturbed_one(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path, "whole", "Pendulum-v1", overlap, timesteps=6 * 64 * 8)
    [_, resumed] = _launchers(
        monkeypatch,
        lambda: [
            train(tmp_path, "parts", "Pendulum-v1", overlap, timesteps=6 * 64 * 4),
            unidle.resume(tmp_path / "parts", timesteps=6 * 64 * 8, quiet=True),
        ],
    )
    assert resumed.launches > 0
    assert_same(final_state(tmp_path / "parts")["algo"], final_state(whole.path)["algo"])


def test_worker_that_dies_for_the_last_time_is_recorded_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_a_worker(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 3:
            [child, *_] = process_children()
            os.kill(child, signal.SIGKILL)

    with pytest.raises(ResumableError, match="max_env_restarts allows 0"):
        _launchers(
            monkeypatch,
            lambda: train(
                tmp_path,
                "killed",
                "Pendulum-v1",
                "off",
                max_env_restarts=0,
                checkpoint_every=10**9,
                after_iteration=[kill_a_worker],
            ),
        )
    faults = [record for record in read_records(tmp_path / "killed" / "metrics.jsonl") if record["kind"] == "fault"]
    assert [fault["fault"] for fault in faults] == ["killed"]


@pytest.mark.parametrize("algo", ["ppo", "sac", "td3", "dqn"])
def test_policies_of_unidle_are_supported(algo: str, tmp_path: Path) -> None:
    env = "CartPole-v1" if algo == "dqn" else "Pendulum-v1"
    settings = {"timesteps": 8, "n_envs": 2, "n_steps": 4, "net_arch": (8,), "eval_every": 0, "quiet": True}
    settings |= {"batch_size": 8}
    policies = []
    unidle.train(
        env, algo=algo, runs_dir=str(tmp_path), after_iteration=[lambda c: policies.append(c.policy)], **settings
    )
    assert all(map(step_loop._draws_nothing, policies[0].modules()))


@pytest.mark.parametrize("layer", [torch.nn.Dropout(), torch.nn.RReLU(), torch.nn.MultiheadAttention(4, 1)])
def test_networks_that_draw_random_numbers_are_not(layer: torch.nn.Module) -> None:
    assert not all(map(step_loop._draws_nothing, torch.nn.Sequential(torch.nn.Linear(4, 4), layer).modules()))


def test_missing_compiler_is_a_reason_to_collect_in_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, reason in ((str(tmp_path / "missing"), "missing"), ("cc '", "quotation"), ("false", "compiled")):
        monkeypatch.setenv("CC", compiler)
        answer = step_loop.library.__wrapped__()
        assert isinstance(answer, str)
        assert reason in answer


def test_cache_that_cannot_be_used_costs_only_a_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not isinstance(step_loop.library.__wrapped__(), str)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert not isinstance(step_loop.library.__wrapped__(), str)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_on_a_gpu_are_those_of_a_run_without_it(
    overlap: str, normalize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []
    new_loop = host.HostCollector._new_loop
    settings = {"normalize_obs": normalize, "device": "cuda"}

    def record(collector: host.HostCollector) -> Any:
        loops.append(new_loop(collector))
        return loops[-1]

    monkeypatch.setattr(host.HostCollector, "_new_loop", record)
    train(tmp_path, "c", "Pendulum-v1", overlap, **settings)
    assert [type(loop) for loop in loops] == [step_loop.StepLoop], loops
    monkeypatch.setattr(host, "loop_unsupported", lambda *_, **__: "this test")
    train(tmp_path, "python", "Pendulum-v1", overlap, **settings)
    assert_same(final_state(tmp_path / "c"), final_state(tmp_path / "python"))


def _launchers(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[CpuLauncher]:
    """Those of the collectors of `run`."""
    with monkeypatch.context() as patched:
        launchers = use_c_loop(patched)
        run()
    return launchers


def process_children() -> list[int]:
    """Pids of this process's children, the oldest first."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in path.read_text().split()]
