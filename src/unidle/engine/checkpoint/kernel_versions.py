"""Which kernels compute a run: the last bits of its weights depend on them."""

from __future__ import annotations

import torch

from unidle.nn.mlp import has_own_kernels


def kernels_on(device: torch.device) -> str:
    """A description that is equal for equal kernels, such as "torch 2.11.0, Triton 3.6.0, NVIDIA H200".

    On a CPU, torch chooses kernels by instruction set; with AVX512 it sums in a different order than with AVX2.
    """
    torch_words = f"torch {torch.__version__}"
    if device.type != "cuda":
        return f"{torch_words}, CPU {torch.backends.cpu.get_cpu_capability()}"
    own = "no Triton"
    if has_own_kernels():
        import triton

        own = f"Triton {triton.__version__}"
    return f"{torch_words}, {own}, {torch.cuda.get_device_name(device)}"
