"""A function on static tensors, replayed as one CUDA graph instead of launched kernel by kernel.

What a function must keep to: it takes no arguments, reads and writes tensors that stay where they are, never asks the
host for a value, and does the same work every time. On a CPU, or if capturing fails, it runs as it is: the results are
the same bit for bit, only slower, and the reason is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 3  # libraries set themselves up in the first calls, which a graph must not record


class Capture:
    """Turns functions into replays on one device, and remembers what could not be captured."""

    def __init__(self, device: torch.device, tell: Callable[[str], None]) -> None:
        """`tell` gets one sentence if something falls back."""
        self.device = device
        self._tell = tell
        self.fallbacks: dict[str, str] = {}  # name → why it runs eagerly on a GPU

    def __call__(self, name: str, function: Callable[[], None], changes: Sequence[Tensor]) -> Callable[[], None]:
        """`function` as a replay; `changes` are all tensors it changes that must be as before after the warm-up."""
        if self.device.type != "cuda":
            return function
        return _Replay(self, name, function, changes)

    def fall_back(self, name: str, error: Exception) -> None:
        """Note and tell that `name` runs eagerly."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.fallbacks[name] = reason
        self._tell(f"{name} could not be captured as a CUDA graph and runs eagerly, which is slower: {reason}")


class _Replay:
    """Captures on the first call, replays from then on."""

    def __init__(self, capture: Capture, name: str, function: Callable[[], None], changes: Sequence[Tensor]) -> None:
        self._capture, self._name, self._function, self._changes = capture, name, function, changes
        self._run: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._run is None:
            self._run = self._captured()
        self._run()

    def _captured(self) -> Callable[[], None]:
        kept = [tensor.detach().clone() for tensor in self._changes]
        stream = torch.cuda.Stream(self._capture.device)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._function()
            # Only this thread must keep still meanwhile: others may copy and launch.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._function()
            run = graph.replay
        except Exception as error:
            self._capture.fall_back(self._name, error)
            run = self._function
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, before in zip(self._changes, kept):
                tensor.copy_(before)
        return run
