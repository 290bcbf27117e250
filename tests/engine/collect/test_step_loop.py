"""The loop of collecting in C: the same rollouts as without it, in far fewer returns to Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from c_loop_on_cpu import CpuLauncher, use_c_loop
from resumed_runs import assert_same, final_state

import unidle
from unidle.engine.collect import host, step_loop

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


def test_missing_compiler_is_reported_and_python_collects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = step_loop.library.__wrapped__()
    assert isinstance(reason, str)
    assert "missing" in reason


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
