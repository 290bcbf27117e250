"""ONNX export of a policy: observations in, actions for the environment out, normalisation and scaling included."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unidle.algos.registry import AnyPolicy
from unidle.engine.agent import Agent
from unidle.errors import UsageError
from unidle.spaces.tree import Path as LeafPath


class _Exported(nn.Module):
    """Leaves of the observation (and mask, recurrent state) → deterministic flat action (and next state)."""

    def __init__(self, policy: AnyPolicy, paths: list[LeafPath]) -> None:
        super().__init__()
        self.policy, self._paths = policy, paths

    def forward(self, leaves: list[Tensor], mask: Tensor | None, state: Tensor | None) -> tuple[Tensor, ...]:
        features = self.policy.encoder.encode(dict(zip(self._paths, leaves)))
        params, after = self.policy.act_on(features, mask, state)
        action = self.policy.distribution.export(params)
        return (action,) if after is None else (action, after)


def export_onnx(agent: Agent, path: Path) -> Path:
    """Write the policy to `path`; the first dimension of all inputs and outputs is the batch.

    Inputs: one per leaf of the observation space (`observation`, or `observation.key` for Dict and Tuple spaces), then
    `action_mask` and `state` where the policy has them. Outputs: `action` [batch, heads + reals] as the environment
    takes it, category numbers first, and `next_state`.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError("ONNX export needs more packages; run: pip install 'unidle[onnx]'.") from None
    policy, obs_layout = agent.policy, agent.policy.encoder.layout  # the part of the observation that the actor gets
    n = 2  # not 1, which the exporter would treat as a constant
    leaves = [torch.from_numpy(np.zeros((n, *leaf.shape), leaf.dtype)) for leaf in obs_layout.leaves]
    names = [".".join(["observation", *map(str, leaf.path)]) for leaf in obs_layout.leaves]
    mask = torch.ones(n, obs_layout.mask_width, dtype=torch.uint8) if obs_layout.mask_width else None
    state = torch.zeros(n, policy.actor_state_size) if policy.actor_state_size else None
    names += ["action_mask"] * (mask is not None) + ["state"] * (state is not None)
    batch = torch.export.Dim("batch", min=1)
    shapes = ([{0: batch}] * len(leaves), None if mask is None else {0: batch}, None if state is None else {0: batch})
    exported = _Exported(policy.cpu(), [leaf.path for leaf in obs_layout.leaves]).eval()
    program = _quietly(
        torch.onnx.export,
        exported,
        (leaves, mask, state),
        input_names=names,
        output_names=["action", *(["next_state"] if state is not None else [])],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(path))
    return path


def _quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the exporter without its log messages and warnings, none of which a user can act on."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments, **options)
    finally:
        log.setLevel(level)
