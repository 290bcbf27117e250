"""The ranks of a data-parallel job, as one of them sees the others.

Every method except the properties is collective: all ranks call the same ones in the same order, or they would wait for
each other until the timeout. Plain values travel through gloo. Tensors on a GPU are reduced by NCCL if every rank has a
GPU of its own; otherwise they are staged in page-locked memory and reduced by gloo. All of it runs outside CUDA graphs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unidle.distributed.place import Place, current_place
from unidle.errors import AgreedError, LostRankError, TrainingError, UsageError

_T = TypeVar("_T")
_KINDS: dict[str, type[Exception]] = {"usage": UsageError, "training": TrainingError}


class Ranks:
    """All ranks of a job; this process is number `rank` of `size`."""

    def __init__(self, place: Place, seconds: float) -> None:
        """Meet the other ranks; a rank that waits for another one longer than `seconds` gives up."""
        self.place, self.rank, self.size, self._seconds = place, place.rank, place.size, seconds
        timeout = timedelta(seconds=seconds)
        if place.size == place.local_size:  # otherwise gloo looks up this machine's name, which may have no address
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._contact():
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timeout)
                atexit.register(_leave)
            self._control = dist.new_group(backend="gloo", timeout=timeout)
        self.have_failed = False  # the ranks have agreed to end
        self._nccl: dist.ProcessGroup | None = None
        self._staged: dict[int, Tensor] = {}  # by number of bytes: page-locked memory

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, evaluates and shows."""
        return self.rank == 0

    def choose_device(self, name: str) -> torch.device:
        """Choose the device of each rank, a GPU of its own where there are enough; and how tensors are reduced."""
        with self.stage():
            device = self._device(name)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        found = self.gather((socket.gethostname(), uuid))
        if len({each is None for _, each in found}) > 1:
            raise UsageError("Some ranks have a GPU and others have none; use --device cpu, or machines of one kind.")
        if uuid is not None and len({*found}) == self.size:
            with self._contact():
                self._nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=self._seconds))
        return device

    def _device(self, name: str) -> torch.device:
        if name not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {name} is one device, but there are {self.size} ranks; leave it out.")
        count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
        if not count and name == "cuda":
            raise UsageError("--device cuda: torch finds no CUDA GPU on this machine; use --device cpu or auto.")
        return torch.device("cuda", self.place.local_rank % count) if count else torch.device("cpu")

    @property
    def backend(self) -> str:
        """How gradients are reduced."""
        return "gloo" if self._nccl is None else "nccl"

    def close(self) -> None:
        """Leave the groups of this run; the ranks may train another one."""
        for group in (self._nccl, self._control):
            if group is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    # -- tensors -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mean_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its mean over the ranks, the same bits on each of them."""
        with self._contact():
            if tensor.is_cuda and self._nccl is not None:
                dist.all_reduce(tensor, group=self._nccl)
            elif tensor.is_cuda:
                self._reduce_on_host(tensor)
            else:
                dist.all_reduce(tensor, group=self._control)
        tensor.div_(self.size)  # not times 1 / size, which is rounded: the mean of 41 ones would be less than 1

    def _reduce_on_host(self, tensor: Tensor) -> None:
        """The sum of a GPU's tensor by gloo, which waits for the stream through an event."""
        staged = self._staged.get(tensor.nbytes)
        if staged is None:
            staged = self._staged[tensor.nbytes] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        copy = staged.view(tensor.dtype).view(tensor.shape)
        copied = torch.cuda.Event()
        copy.copy_(tensor, non_blocking=True)
        copied.record()
        copied.synchronize()
        dist.all_reduce(copy, group=self._control)
        tensor.copy_(copy, non_blocking=True)
        # The next reduction overwrites the copy only after it has waited for the same stream.

    def merged(self, mean: Tensor, var: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
        """Mean and (biased) variance of the samples of all ranks, `count` on each (Chan et al. 1979)."""
        whole = mean.clone()
        self.mean_(whole)
        spread = var + (mean - whole).square()
        self.mean_(spread)
        return whole, spread, count * self.size

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        for tensor in tensors:
            copy = tensor.detach().cpu()
            with self._contact():
                dist.broadcast(copy, 0, group=self._control)
            if not self.is_first:
                tensor.detach().copy_(copy)

    # -- plain values --------------------------------------------------------------------------------------------------

    def gather(self, value: _T) -> list[_T]:
        """The value of each rank."""
        values: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def all(self, value: bool) -> bool:
        """Whether `value` is true on every rank."""
        flag = torch.tensor([float(value)])
        with self._contact():
            dist.all_reduce(flag, group=self._control)
        return int(flag) == self.size

    def from_first(self, function: Callable[[], _T]) -> _T:
        """What `function` returns on rank 0, where alone it is called; its error ends all ranks."""
        values: list[Any] = [None]
        with self.stage():
            if self.is_first:
                values[0] = function()
        with self._contact():
            dist.broadcast_object_list(values, 0, group=self._control)
        result: _T = values[0]
        return result

    # -- failures ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """A part of the program that fails on all ranks if it fails on one, see `agree`."""
        error: Exception | None = None
        try:
            yield
        except (UsageError, TrainingError) as failure:
            if self.have_failed:
                raise
            error = failure
        self.agree(error)

    def agree(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error: rank 0 the first rank's error, the others `AgreedError`."""
        kind = None if error is None else "usage" if isinstance(error, UsageError) else "training"
        found = self.gather(None if error is None else (kind, str(error)))
        failed = [rank for rank, each in enumerate(found) if each is not None]
        if not failed:
            return
        self.have_failed = True
        if not self.is_first:
            raise AgreedError("Rank 0 reports why the job ends.") from error
        if error is not None:
            raise error
        first = found[failed[0]]
        assert first is not None
        raise _KINDS[first[0] or "training"](f"Rank {failed[0]}: {first[1]}")

    @contextlib.contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            reason = re.sub(r"^\[[^]]*\] ", "", lines[0]).partition(". ")[0].rstrip(".")  # without torch's source line
            raise LostRankError(f"Rank {self.rank} lost contact with another rank ({reason}).") from error


def on_first(ranks: Ranks | None, function: Callable[[], _T]) -> _T:
    """`Ranks.from_first`, or the result of `function` in a process that trains alone."""
    return function() if ranks is None else ranks.from_first(function)


def stage(ranks: Ranks | None) -> contextlib.AbstractContextManager[None]:
    """`Ranks.stage`, or nothing in a process that trains alone."""
    return contextlib.nullcontext() if ranks is None else ranks.stage()


def _leave() -> None:
    """Before the interpreter ends: gloo's threads would end the process with an error."""
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()


@contextlib.contextmanager
def joined(seconds: float) -> Iterator[Ranks | None]:
    """The ranks of this job while a run trains; None if this process trains alone."""
    place = current_place()
    if place is None:
        yield None
        return
    ranks = Ranks(place, seconds)
    try:
        yield ranks
    finally:
        ranks.close()
