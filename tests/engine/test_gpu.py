"""Training on a CUDA GPU: it learns, is reproducible, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from identity_envs import ActionIdentityEnv, CueMemoryEnv, MaskedActionsEnv, ObservationIdentityEnv

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder

pytestmark = pytest.mark.gpu

IMAGES = spaces.Box(0, 255, (40, 40, 3), "uint8")
MIXED_ACTIONS = spaces.Dict(turn=spaces.MultiDiscrete([2, 5, 3]), push=spaces.Box(-1, 1, (2,)))

TASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "CartPole": ("CartPole-v1", {"normalize_obs": True, "normalize_reward": True}),
    "images": (lambda: ObservationIdentityEnv(IMAGES), {}),
    "images in bfloat16": (lambda: ObservationIdentityEnv(IMAGES), {"precision": "bf16"}),
    "images, IMPALA": (lambda: ObservationIdentityEnv(IMAGES), {"encoder": "impala"}),
    "mixed discrete and continuous actions": (lambda: ActionIdentityEnv(MIXED_ACTIONS), {"target_kl": 0.05}),
    "action masks": (MaskedActionsEnv, {"ent_coef": 0.01}),
    "gru": (CueMemoryEnv, {"recurrent": "gru", "recurrent_size": 16}),
    "strict overlap": ("Pendulum-v1", {"overlap": "strict", "normalize_obs": True, "workers": 2}),
    "device env": ("unidle/CartPole-v1", {"normalize_obs": True}),
    "device env, continuous": ("unidle/Pendulum-v1", {"normalize_reward": True}),
    "strict overlap, gru": (CueMemoryEnv, {"overlap": "strict", "recurrent": "gru", "recurrent_size": 16}),
}
SMALL = {
    "preset": "classic",
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 4,
    "net_arch": (64,),
    "timesteps": 2560,
    "eval_every": 0,
    "tensorboard": False,
    "device": "cuda",
    "quiet": True,
}


def final_policy(path: Path) -> dict[str, torch.Tensor]:
    latest = RunFolder.open(path).latest()
    assert latest is not None
    policy: dict[str, torch.Tensor] = load_checkpoint(latest)["algo"]["policy"]
    return policy


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("name", TASKS)
def test_weights_on_gpu_depend_only_on_seed(name: str, tmp_path: Path) -> None:
    env, extra = TASKS[name]
    runs = [
        unidle.train(env=env, seed=seed, run_name=str(number), runs_dir=str(tmp_path), **{**SMALL, **extra})
        for number, seed in enumerate((1, 1, 2))
    ]
    first, second, other = (final_policy(run.path) for run in runs)
    assert_equal(first, second)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", TASKS)
def test_resumed_run_on_gpu_equals_uninterrupted_run(name: str, tmp_path: Path) -> None:
    env, extra = TASKS[name]
    settings = {**SMALL, **extra, "seed": 3, "runs_dir": str(tmp_path)}

    def stop(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 4:
            context.stop()

    uninterrupted = unidle.train(env=env, run_name="uninterrupted", **settings)
    unidle.train(env=env, run_name="resumed", after_iteration=[stop], **settings)
    factory = env if callable(env) else None
    resumed = unidle.resume(tmp_path / "resumed", env=factory, quiet=True)
    assert_equal(final_policy(resumed.path), final_policy(uninterrupted.path))


REPLAY = {"buffer_size": 300, "learning_starts": 100, "utd_ratio": 0.25, "n_steps": 8, "timesteps": 640}
FROM_IMAGES: dict[str, dict[str, Any]] = {
    "ppo": {"algo": "ppo"},
    "ppo in bfloat16, strict overlap": {"algo": "ppo", "precision": "bf16", "overlap": "strict"},
    "ppo, IMPALA": {"algo": "ppo", "encoder": "impala"},
    "dqn": {"algo": "dqn", "preset": "dqn", "frame_stack": 3, "random_shift": 4, **REPLAY},
    "sac": {"algo": "sac", "preset": "sac", "frame_stack": 3, "random_shift": 4, **REPLAY},
}


@pytest.mark.parametrize("name", FROM_IMAGES)
def test_captured_training_from_images_equals_eager_training(name: str, tmp_path: Path) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), **FROM_IMAGES[name]}
    if settings["algo"] != "ppo":
        del settings["n_epochs"]
    captured, eager = (
        unidle.train(lambda: ObservationIdentityEnv(IMAGES), run_name=str(graphs), graphs=graphs, **settings)
        for graphs in (True, False)
    )
    assert_equal(final_policy(captured.path), final_policy(eager.path))


def test_ppo_solves_cartpole_on_gpu(tmp_path: Path) -> None:
    settings = {**SMALL, "n_envs": 16, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "timesteps": 120_000}
    run = unidle.train(
        env="CartPole-v1",
        runs_dir=str(tmp_path),
        **{**settings, "eval_every": 8192, "target_return": 475, "learning_rate": 1e-3},
    )
    assert run.summary()["best_evaluation"] >= 475


def test_policy_trained_on_gpu_gives_same_actions_on_cpu(tmp_path: Path) -> None:
    run = unidle.train(env="Pendulum-v1", runs_dir=str(tmp_path), **{**SMALL, "precision": "fp32"})
    from unidle.engine.agent import read_agent

    on_gpu, on_cpu = (read_agent(run.folder.best_or_latest(), run.config, None, device) for device in ("cuda", "cpu"))
    torch.manual_seed(0)
    for observation in torch.randn(20, 3).clamp(-1, 1).numpy():
        assert on_gpu.predict(observation) == pytest.approx(on_cpu.predict(observation), abs=1e-5)
