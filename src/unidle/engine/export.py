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
    """Leaves of the observation, mask and recurrent state if any → deterministic flat action, and next state if any.

    The inputs are one list without gaps: the exporter names no axes if one of its inputs is None.
    """

    def __init__(self, policy: AnyPolicy, paths: list[LeafPath]) -> None:
        super().__init__()
        self.policy, self._paths = policy, paths

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        features = self.policy.encoder.encode(dict(zip(self._paths, inputs)))
        others = inputs[len(self._paths) :]
        mask = others[0] if self.policy.masked else None
        state = others[-1] if self.policy.actor_state_size else None
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
    inputs = [torch.from_numpy(np.zeros((n, *leaf.shape), leaf.dtype)) for leaf in obs_layout.leaves]
    names = [".".join(["observation", *map(str, leaf.path)]) for leaf in obs_layout.leaves]
    outputs = ["action"]
    if policy.masked:
        inputs.append(torch.ones(n, obs_layout.mask_width, dtype=torch.uint8))
        names.append("action_mask")
    if policy.actor_state_size:
        inputs.append(torch.zeros(n, policy.actor_state_size))
        names.append("state")
        outputs.append("next_state")
    exported = _Exported(policy.cpu(), [leaf.path for leaf in obs_layout.leaves]).eval()
    program = _quietly(
        torch.onnx.export,
        exported,
        (inputs,),
        input_names=names,
        output_names=outputs,
        dynamic_shapes=([{0: torch.export.Dim("batch", min=1)}] * len(inputs),),
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
