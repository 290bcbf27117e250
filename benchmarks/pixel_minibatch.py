"""One PPO minibatch from images alone: forward, backward and Adam, as a CUDA graph, and its floor.

Used by pixels.py, in several forms: `plain` is the formula that a CPU uses (bytes → floats → ÷ 255 → channels first);
`channels_last` has one conversion, channels last and the division in the weights; `blocks` also turns blocks of pixels
into channels in the first layer; `unidle` is what unidle runs on this GPU, with its Triton kernels.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pixel_env import SHAPE

FORMS = ("plain", "channels_last", "blocks", "unidle")
_PARAMETER_PASSES = 10  # weights read forward and backward, gradient written; Adam reads four tensors and writes three
_FLOPS = {"fp32": 495e12, "tf32": 495e12, "bf16": 989e12}  # peak rates of an H200, dense
_BYTES_PER_SECOND = 4.8e12


def measure(recipe: Any, form: str, seconds: float) -> dict[str, float]:
    """Milliseconds per minibatch, and its floor."""
    import numpy as np
    import torch
    from gymnasium import spaces

    from unidle.algos.ppo_ops import new_ppo
    from unidle.algos.run_to_end import run_to_end
    from unidle.buffers.rollout import Rollout
    from unidle.engine.cuda_graphs import Capture
    from unidle.engine.placement import set_numerics
    from unidle.nn.actor_critic import ActorCritic
    from unidle.spaces.actions import ActionLayout
    from unidle.spaces.observations import ObservationLayout

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_numerics(device, recipe)
    torch.manual_seed(0)
    layout = ObservationLayout.of(spaces.Box(0, 255, SHAPE, np.uint8))
    policy = ActorCritic(layout, ActionLayout.of(spaces.Discrete(4)), recipe).to(device)
    _use(form)
    capture = Capture(device, print)
    algo = new_ppo(policy, recipe, capture, capture.fall_back)
    rollout = Rollout(recipe.n_steps, recipe.n_envs, layout.obs_bytes, 1, 0, device)
    rollout.obs.random_(0, 256)
    rollout.actions.random_(0, 4)
    rollout.rewards.normal_()
    batch = run_to_end(algo.ops.prepare(rollout, None))
    shuffle = torch.Generator(device).manual_seed(0)
    orders = list(algo.ops.minibatches(batch, shuffle))

    def run(seconds: float) -> float:
        """Seconds per minibatch."""
        began, count = time.perf_counter(), 0
        epochs = 8 if device.type == "cuda" else 1  # between two waits
        while not count or time.perf_counter() - began < seconds:
            for order in epochs * orders:
                algo.ops.step(batch, order)
                count += len(order)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    run(min(1.0, seconds))
    per_minibatch = run(seconds)
    found = floor(policy, recipe.batch_size, recipe.precision)
    return {"ms": 1e3 * per_minibatch, **found, "captured": float(device.type == "cuda" and not capture.fallbacks)}


def _use(form: str) -> None:
    """Make image encoders of this process compute in this form."""
    import torch
    from torch import Tensor, nn

    from unidle.nn import cnn, pixels

    def plain(image: Tensor, layers: Any, dtype: Any, kernels: Any = None) -> Tensor:
        out: Tensor = layers(image.float() / 255.0)
        return out

    def channels_last(image: Tensor, layers: Any, dtype: Any, kernels: Any = None) -> Tensor:
        first, values = layers[0], image.to(dtype, memory_format=torch.channels_last)
        values = nn.functional.conv2d(values, first.weight / 255.0, first.bias, first.stride, first.padding)
        for layer in layers[1:]:
            values = layer(values)
        return values

    def blocks(image: Tensor, layers: Any, dtype: Any, kernels: Any = None) -> Tensor:
        return pixels.convolve_images(image, layers, dtype)

    forms = {"plain": plain, "channels_last": channels_last, "blocks": blocks}
    if form in forms:
        vars(cnn)["convolve_images"] = forms[form]


def floor(policy: Any, rows: int, precision: str) -> dict[str, float]:
    """Arithmetic and least memory traffic of a minibatch of `rows`, and the time they need on an H200.

    Each layer takes the same number of operations forward, for the gradient of its weights, and for that of its inputs,
    which the first layer does not need. Activations are written and read once forward, read once backward, and their
    gradients are written and read once; pixels are read as bytes, twice.
    """
    import torch
    from torch import nn

    outputs: list[tuple[int, int, bool]] = []  # elements of a layer's output, operations for each, is it the first?

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        weight: Any = layer.weight
        outputs.append((output.numel() // len(inputs[0]), 2 * weight[0].numel(), not outputs))

    layers = [module for module in policy.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    pixels = 1
    for size in SHAPE:
        pixels *= size
    with torch.no_grad():
        features = policy.encoder.cnns[0].project(
            policy.encoder.cnns[0].convolutions(torch.zeros(1, *SHAPE, device=next(policy.parameters()).device))
        )
        policy.actor_head(policy.actor_trunk(features))
        policy.critic_head(policy.critic_trunk(features))
    for hook in hooks:
        hook.remove()
    flops = sum(rows * size * each * (2 if is_first else 3) for size, each, is_first in outputs)
    itemsize = 2 if precision == "bf16" else 4
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    traffic = (
        rows * (2 * pixels + 5 * itemsize * sum(size for size, _, _ in outputs)) + _PARAMETER_PASSES * 4 * parameters
    )
    return {
        "gflop": flops / 1e9,
        "megabytes": traffic / 1e6,
        "floor_ms": 1e3 * (flops / _FLOPS[precision] + traffic / _BYTES_PER_SECOND),
    }


def measured(recipe: Any, side: str, seconds: float) -> dict[str, float]:
    """`measure` for a side such as `blocks bf16`."""
    form, precision = side.split()
    return measure(replace(recipe, precision=precision), form, seconds)
