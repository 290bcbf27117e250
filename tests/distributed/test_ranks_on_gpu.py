"""Two ranks on the GPU: captured graphs that are split where gradients are reduced, and no sync besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks

pytestmark = pytest.mark.gpu

OFF_POLICY = {"n_steps": 8, "batch_size": 64, "learning_starts": 128, "buffer_size": 10_000, "timesteps": 10 * 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"env": "CartPole-v1", "n_steps": 64, "batch_size": 128, "target_kl": 0.05, "normalize_obs": True},
    "strict": {"env": "Pendulum-v1", "n_steps": 64, "batch_size": 128, "overlap": "strict", "normalize_reward": True},
    "sac": {"env": "Pendulum-v1", "algo": "sac", **OFF_POLICY},
    "td3": {"env": "Pendulum-v1", "algo": "td3", **OFF_POLICY},
    "dqn": {"env": "CartPole-v1", "algo": "dqn", **OFF_POLICY},
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", SETTINGS)
def test_ranks_keep_equal_weights_without_syncs(kind: str, graphs: bool, tmp_path: Path) -> None:
    common = {"n_envs": 8, "workers": 2, "eval_every": 0, "checkpoint_every": 10**9, "device": "cuda", "quiet": True}
    settings = {"timesteps": 10 * 512, **common, "graphs": graphs, "runs_dir": str(tmp_path), **SETTINGS[kind]}
    first, second = on_ranks("guarded", 2, tmp_path, settings=settings)
    assert first["digests"] == second["digests"]
    assert len({*first["digests"]}) >= 8
    assert not first["fallbacks"]
    assert not second["fallbacks"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_ranks_with_a_gpu_each_reduce_with_nccl_and_have_equal_weights(kind: str, tmp_path: Path) -> None:
    common = {"n_envs": 8, "workers": 2, "eval_every": 0, "device": "cuda", "quiet": True}
    settings = {**common, "runs_dir": str(tmp_path), **SETTINGS[kind], "timesteps": 2 * 512}
    first, second = on_ranks("digests_and_backend", 2, tmp_path, settings=settings)
    assert first == second
    assert first["backend"] == "nccl"
    assert len({*first["digests"]}) >= 2


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_split_graphs_repeat_eager_execution(kind: str, tmp_path: Path) -> None:
    common = {"n_envs": 8, "workers": 2, "eval_every": 0, "device": "cuda", "quiet": True, "seed": 3}
    found = []
    for graphs in (True, False):
        folder = tmp_path / str(graphs)
        folder.mkdir()
        settings = {"timesteps": 5 * 512, **common, "graphs": graphs, "runs_dir": str(folder), **SETTINGS[kind]}
        found.append(on_ranks("digests", 2, folder, settings=settings)[0])
    assert found[0] == found[1]
