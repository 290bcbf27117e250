"""For a replay buffer that is too large for the device: its batches are copied there ahead of their updates."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from unidle.buffers.replay import Transitions
from unidle.errors import UsageError


class Sampler(Protocol):
    """Anything to sample transitions from."""

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """A batch, in new tensors."""


class Prefetch:
    """Copies batches from a buffer on the host to the device, asynchronously, during the previous update.

    host buffer → pinned (host) → incoming (device) → batch (device). Only `take` writes to `batch`, always the same
    tensors, so a captured graph can read them; after that, `incoming` is free for the next batch.

    An update uses it like any other sampler: `sample` returns the batch that was taken last.
    """

    def __init__(self, source: Sampler, batch_size: int, device: torch.device) -> None:
        self._source, self._batch_size, self._device = source, batch_size, device
        example = source.sample(batch_size, torch.Generator())  # for the shapes; not from the run's own random stream
        self._on_gpu = device.type == "cuda"
        self._pinned = Transitions(*(torch.empty_like(t, pin_memory=self._on_gpu) for t in example.tensors()))
        self._incoming = Transitions(*(torch.zeros_like(t, device=device) for t in example.tensors()))
        self.batch = Transitions(*(torch.zeros_like(t, device=device) for t in example.tensors()))
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._copied, self._consumed = torch.cuda.Event(), torch.cuda.Event()
            self._consumed.record(torch.cuda.current_stream(device))  # `incoming` is allocated

    def send(self, generator: torch.Generator) -> None:
        """Sample the next batch, with a generator on the host, and start copying it."""
        sample = self._source.sample(self._batch_size, generator)
        if not self._on_gpu:
            self._incoming.copy_(sample)
            return
        self._copied.synchronize()  # the previous copy finished long ago, so this does not wait
        self._pinned.copy_(sample)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)
            self._incoming.copy_(self._pinned)
            self._copied.record(self._stream)

    def take(self) -> Transitions:
        """The batch that was sent last; the current stream waits for it, the host does not."""
        if not self._on_gpu:
            self.batch.copy_(self._incoming)
            return self.batch
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied)
        self.batch.copy_(self._incoming)
        self._consumed.record(stream)
        return self.batch

    def sample(self, batch_size: int, generator: torch.Generator) -> Transitions:
        """The batch that was taken last; it was sampled when it was sent."""
        assert batch_size == self._batch_size
        return self.batch


def choose_buffer_device(
    capacity: int, bytes_per_transition: int, device: torch.device, device_bytes: int, host_bytes: int
) -> Literal["device", "host"]:
    """Where a buffer of this size goes: on the device if it fits, else on the host; UsageError if it fits nowhere."""
    needed = capacity * bytes_per_transition
    if device.type == "cpu":
        device_bytes = host_bytes
    if needed <= device_bytes:
        return "device"
    if needed <= host_bytes:
        return "host"
    on_device = "" if device.type == "cpu" else f"{device} has {in_gib(device_bytes)} free and "
    raise UsageError(
        f"A replay buffer of {capacity:,} steps needs {in_gib(needed)}, but {on_device}the host has "
        f"{in_gib(host_bytes)} free; set --buffer-size to at most "
        f"{max(device_bytes, host_bytes) // bytes_per_transition:,}."
    )


def in_gib(n_bytes: int) -> str:
    """`n_bytes` in GiB, as text."""
    return f"{n_bytes / 2**30:,.1f} GiB"
