"""The GAE kernel against the plain scan."""

from __future__ import annotations

import os

import pytest
import torch

from unidle.buffers.advantages import gae

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("steps", "n_envs"), [(1, 1), (7, 65), (33, 128)])
def test_gae_matches_plain_scan(steps: int, n_envs: int, weighted: bool) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.gae import gae as fused_gae

    generator = torch.Generator().manual_seed(steps)
    rewards, bootstrap = torch.randn(2, steps, n_envs, generator=generator).to(DEVICE)
    values = torch.randn(steps + 1, n_envs, generator=generator).to(DEVICE)
    draw = torch.rand(steps, n_envs, generator=generator).to(DEVICE)
    importance = (2 * torch.rand(steps, n_envs, generator=generator)).to(DEVICE) if weighted else None
    arguments = rewards, values, bootstrap, draw < 0.1, draw > 0.9, 0.97, 0.9, importance
    for ours, theirs in zip(fused_gae(*arguments), gae(*arguments)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
