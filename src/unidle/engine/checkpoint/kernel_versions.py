"""Identifies the kernels of a run: the last bits of its weights depend on them."""

from __future__ import annotations

import torch

from unidle.nn.mlp import uses_triton_layers


def kernels_on(device: torch.device) -> str:
    """A description that identifies the kernels, such as "torch 2.11.0, Triton 3.6.0, NVIDIA H200".

    On a CPU, torch chooses kernels by instruction set; with AVX512 it sums in a different order than with AVX2.
    """
    torch_version = f"torch {torch.__version__}"
    if device.type != "cuda":
        return f"{torch_version}, CPU {torch.backends.cpu.get_cpu_capability()}"
    triton_version = "no Triton"
    if uses_triton_layers():
        import triton

        triton_version = f"Triton {triton.__version__}"
    return f"{torch_version}, {triton_version}, {torch.cuda.get_device_name(device)}"
