"""Training from images: both encoders with every algorithm, frame stacks stored once, resume and export."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from image_envs import RandomImages
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.engine.export import export_onnx
from unidle.errors import UsageError

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 4,
    "batch_size": 8,
    "net_arch": (8,),
    "timesteps": 96,
    "eval_every": 0,
    "subproc": False,
    "tensorboard": False,
    "device": "cpu",
    "seed": 5,
    "quiet": True,
}
REPLAY = {"buffer_size": 40, "learning_starts": 24, "utd_ratio": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"preset": "classic", "n_epochs": 2},
    **{algo: {"preset": algo, **REPLAY} for algo in ("sac", "td3", "dqn")},
}


def env_of(algo: str, shape: tuple[int, ...] = (10, 9, 3)) -> partial[RandomImages]:
    return partial(RandomImages, shape, continuous=algo in ("sac", "td3"))


@pytest.mark.parametrize("encoder", ["nature", "impala"])
@pytest.mark.parametrize("algo", SETTINGS)
def test_resumed_run_from_images_equals_uninterrupted_run(algo: str, encoder: str, tmp_path: Path) -> None:
    settings = {**SMALL, **SETTINGS[algo], "algo": algo, "encoder": encoder, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env_of(algo), run_name="uninterrupted", **settings)
    unidle.train(env_of(algo), run_name="resumed", after_iteration=[StopAfter(7)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", env=env_of(algo), quiet=True)
    assert resumed.config.recipe.encoder == encoder
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))


@pytest.mark.parametrize("algo", SETTINGS)
def test_exported_impala_policy_gives_same_actions_as_predict(algo: str, tmp_path: Path) -> None:
    settings = {**SMALL, **SETTINGS[algo], "algo": algo, "encoder": "impala"}
    agent = unidle.train(env_of(algo), runs_dir=str(tmp_path), **settings).agent
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so that actions differ
        for parameter in agent.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    images = np.random.default_rng(0).integers(0, 256, (12, 10, 9, 3), np.uint8)
    expected = np.stack([agent.action_layout.encode(agent.predict(image)) for image in images])
    exported = onnxruntime.InferenceSession(str(export_onnx(agent, tmp_path / "policy.onnx")))
    (actions,) = exported.run(["action"], {"observation": images})
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "env", "message"),
    [
        ({"encoder": "impala"}, "CartPole-v1", "`encoder` impala is for images"),
        ({"encoder": "impala", "network": "custom_networks:wide"}, RandomImages, "`network` replaces the built-in"),
    ],
    ids=["no images", "custom network"],
)
def test_encoder_without_effect_is_refused(settings: dict[str, Any], env: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(env, **{**SMALL, **settings}, runs_dir=str(tmp_path))


def test_summary_names_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "quiet": False, "timesteps": 8, "runs_dir": str(tmp_path)}
    unidle.train(RandomImages, encoder="impala", **settings)
    assert "impala CNN → 8" in " ".join(capsys.readouterr().err.split())
