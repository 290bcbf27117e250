"""Probes on a real GPU, of jobs whose problem exists only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unidle.buffers.placement import ON_HOST
from unidle.config import Config
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.engine.cuda_graphs import EAGERLY
from unidle.tuning.probes.probe_job import probe_job

pytestmark = pytest.mark.gpu

SECONDS = 1.6  # of probing in total
GIB = 2**30


def job(preset: str, env: str, **settings: Any) -> Config:
    layers = resolve_layers(preset, None, True, env)
    wanted = {"env": env, "device": "cuda", **settings}
    return validated(layers.with_flags(wanted), layers.preset_batch_size)


SMALL: dict[str, Any] = {"n_envs": 4, "n_steps": 64, "batch_size": 64, "n_epochs": 2, "net_arch": (64, 64)}


def test_probes_measure_copies_cpu_and_tf32_and_restore_precision() -> None:
    found = probe_job(job("classic", "slow_envs:Cheap", precision="fp32", **SMALL), SECONDS)
    assert found.profile.on_gpu
    assert found.profile.other_device is not None
    assert found.sent_bytes == 4 * 8 * 4
    assert found.to_device is not None
    assert found.to_device > 1e9
    assert found.learning_in_tf32 is not None
    assert found.learning_in_tf32 > 0
    assert found.learning_with_replay_on_gpu is None
    assert torch.get_float32_matmul_precision() == "highest"


def test_host_sync_in_a_network_is_reported_with_its_line() -> None:
    found = probe_job(job("classic", "slow_envs:Cheap", network="slow_networks:HostSync", **SMALL), SECONDS)
    eager = [text for text in found.messages if f"{EAGERLY}, which is slower" in text]
    assert {text.split(" could")[0] for text in eager} == {"inference", "learning"}
    assert all(".item()" in text for text in eager)


def test_graphs_are_probed_if_disabled() -> None:
    profile = probe_job(job("classic", "slow_envs:Cheap", graphs=False, **SMALL), SECONDS).profile
    assert profile.graphed is not None
    assert profile.graphed.learning < profile.pace.learning
    assert profile.graphed.collecting is not None
    assert profile.graphed.collecting < profile.collecting


def test_replay_buffer_on_host_is_compared_with_one_on_the_gpu() -> None:
    reserved = torch.empty(torch.cuda.mem_get_info()[0] - 4 * GIB, dtype=torch.uint8, device="cuda")
    try:
        settings = {"n_envs": 16, "batch_size": 256, "utd_ratio": 0.25, "buffer_size": 5 * GIB // 28_224}
        found = probe_job(job("dqn", "slow_envs:Pictures", precision="fp32", **settings), SECONDS)
    finally:
        del reserved
        torch.cuda.empty_cache()
    assert found.replay_on_host
    assert found.profile.update_overhead is None
    assert found.learning_with_replay_on_gpu is not None
    assert 0 < found.learning_with_replay_on_gpu < found.profile.pace.learning
    assert found.learning_in_tf32 is not None
    assert [text for text in found.messages if ON_HOST in text]
