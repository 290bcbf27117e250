"""Plays a recording of `record_nvml` to the meter: `python replay_nvml.py RECORDING` prints, as JSON, what it sees.

The real binding finds the player where it looks for the driver's functions. A question is answered by the first answer
to the same question that was recorded later than the meter's clock stands, which then moves on to it: nobody waits. A
question that was not asked in the recording is not answered, and told in `unanswered`.
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

from nvml_door import Clock, Watch, behind_the_door, binding, memory_of, places, question, read


class Player:
    """Stands in the driver's place."""

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
        asked = question(arguments, int)
        calls = self._calls[name]
        for at_ns, other, code, written in calls[bisect_right(calls, self.clock.now_ns, key=lambda call: call[0]) :]:
            if other == asked:
                self.clock.move(at_ns)
                for argument, what in zip(arguments, written, strict=True):
                    if what is not None:
                        self._write(memory_of(argument), what)
                return int(code)
        self.unanswered.add(f"{name}{asked}")
        return int(binding().NVML_ERROR_UNKNOWN)

    def _write(self, memory: Any, what: int | str) -> None:
        size, before = ctypes.sizeof(memory), bytes(memory)
        if isinstance(what, str):
            data = bytearray(int(what.removeprefix("handle ")).to_bytes(size, sys.byteorder))
        else:
            data = bytearray(self._memory[what].ljust(size, b"\0"))
            assert len(data) == size, f"{len(data)} bytes were recorded, and {type(memory).__name__} has {size}"
            for start, length, kind in places(memory.__class__):
                if kind == "address":  # those recorded are of another process
                    data[start : start + length] = before[start : start + length]
        ctypes.memmove(ctypes.addressof(memory), bytes(data), size)


def replay(recording: dict[str, Any]) -> dict[str, Any]:
    """What the meter sees of the recorded machine."""
    player = Player(recording)
    binding()._LoadNvmlLibrary = lambda: None
    with behind_the_door(player.pointer, player.clock):
        watch = Watch()
        for at_ns in recording["looks"]:
            player.clock.move(at_ns)
            watch.look()
        return {**watch.end(), "unanswered": sorted(player.unanswered)}


if __name__ == "__main__":
    json.dump(replay(read(Path(sys.argv[1]))), sys.stdout)
