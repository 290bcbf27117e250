"""An engine file: engine settings that suit one machine, and which machine that was.

    engine: {workers: 15, slices: 2}
    machine: {cores: 16, gpu: NVIDIA H200}

It may hold every setting of the engine, in the section `engine` or by itself, and none that changes what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unidle.config.fields import coerce, section_of, unknown_key
from unidle.config.files import read_yaml
from unidle.config.machine import available_cores
from unidle.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """What engine settings depend on."""

    cores: int
    gpu: str | None  # its name; None: there is none

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return f"{cores} and {f'an {self.gpu}' if self.gpu else 'no GPU'}"


@dataclass(frozen=True)
class EngineFile:
    """What such a file says."""

    source: str
    values: dict[str, Any]  # engine setting → value
    machine: Machine | None  # for which it was made, if it says so

    def note(self, gpu_name: Callable[[], str | None]) -> str | None:
        """What to say if it was made for another machine than this; `gpu_name` tells which GPU is here."""
        here = self.machine and Machine(available_cores(), gpu_name())
        if self.machine == here:
            return None
        return (
            f"{self.source} was made for {self.machine}, and here are {here}; `unidle tune` makes one for this machine."
        )


def read_engine_file(path: Path) -> EngineFile:
    """The settings in it; a UsageError where one is no engine setting."""
    source, tree = str(path), read_yaml(path)
    machine = _machine(tree.pop("machine", None), source)
    inner = tree.pop("engine", {})
    if not isinstance(inner, dict):
        raise UsageError(f"{source}: `engine` must hold `name: value` lines.")
    values = {str(name): value for name, value in {**tree, **inner}.items()}
    for name in values:
        section = name if name in ("recipe", "run") else section_of(name)
        if section is None:
            raise UsageError(unknown_key(name, source))
        if section != "engine":
            why = "changes what is learned" if section == "recipe" else "is about the run"
            raise UsageError(
                f"{source}: `{name}` {why}, and an engine file holds engine settings only; give it as a flag or by "
                "--config."
            )
    return EngineFile(source, {name: coerce(name, value, source) for name, value in values.items()}, machine)


def engine_yaml(values: dict[str, Any], machine: Machine, comment: str) -> str:
    """The text of an engine file that begins with `comment`."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    tree = {"engine": values, "machine": {"cores": machine.cores, "gpu": machine.gpu}}
    return lines + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _machine(told: Any, source: str) -> Machine | None:
    if told is None:
        return None
    known = isinstance(told, dict) and {"cores", "gpu"} >= told.keys() and isinstance(told.get("cores"), int)
    if not known or not isinstance(told.get("gpu"), (str, type(None))):
        raise UsageError(f"{source}: `machine` must hold `cores`, a number, and `gpu`, a name or nothing.")
    return Machine(told["cores"], told.get("gpu"))
