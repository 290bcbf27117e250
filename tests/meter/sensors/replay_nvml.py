"""Replays a recording of `record_nvml` to the meter: `python replay_nvml.py RECORDING` prints its readings as JSON.

The real binding calls the player instead of the driver. A call gets the first recorded answer to the same call that is
later than the meter's clock, which then advances to it, so nothing waits. Calls that are not in the recording fail and
are listed in `unanswered`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvml_hook import Clock, MeterPoller, binding, hooked, memory_of, read, request, sensitive_fields


class Player:
    """Replaces the driver."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self.clock = Clock(recording["system_ns"])
        self.unanswered: set[str] = set()
        self._missing = set(recording["missing"])
        self._memory = [bytes.fromhex(text) for text in recording["memory"]]
        self._calls: dict[str, list[list[Any]]] = {}
        for at_ns, name, *rest in recording["calls"]:
            self._calls.setdefault(name, []).append([at_ns, *rest])

    def pointer(self, name: str) -> Callable[..., int]:
        if name not in self._calls:
            if name not in self._missing:
                self.unanswered.add(name)
            nvml = binding()
            raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> int:
        inputs = request(arguments, int)
        calls = self._calls[name]
        for at_ns, other, code, written in calls[bisect_right(calls, self.clock.now_ns, key=lambda call: call[0]) :]:
            if other == inputs:
                self.clock.move(at_ns)
                for argument, what in zip(arguments, written, strict=True):
                    if what is not None:
                        self._write(memory_of(argument), what)
                return int(code)
        self.unanswered.add(f"{name}{inputs}")
        return int(binding().NVML_ERROR_UNKNOWN)

    def _write(self, memory: Any, what: int | str) -> None:
        size, before = ctypes.sizeof(memory), bytes(memory)
        if isinstance(what, str):
            data = bytearray(int(what.removeprefix("handle ")).to_bytes(size, sys.byteorder))
        else:
            data = bytearray(self._memory[what].ljust(size, b"\0"))
            assert len(data) == size, f"{len(data)} bytes were recorded, and {type(memory).__name__} has {size}"
            for start, length, kind in sensitive_fields(memory.__class__):
                if kind == "address":  # recorded addresses are from another process
                    data[start : start + length] = before[start : start + length]
        ctypes.memmove(ctypes.addressof(memory), bytes(data), size)


def replay(recording: dict[str, Any]) -> dict[str, Any]:
    """What the meter reads from the recorded machine."""
    player = Player(recording)
    binding()._LoadNvmlLibrary = lambda: None
    with hooked(player.pointer, player.clock):
        poller = MeterPoller()
        for at_ns in recording["looks"]:
            player.clock.move(at_ns)
            poller.poll()
        return {**poller.end(), "unanswered": sorted(player.unanswered)}


if __name__ == "__main__":
    json.dump(replay(read(Path(sys.argv[1]))), sys.stdout)
