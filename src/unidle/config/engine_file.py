"""Reads and writes engine files: engine settings, and the machine they were tuned on.

    engine: {workers: 15, slices: 2}
    machine: {cores: 16, gpu: NVIDIA H200}

Engine settings may be at the top level or in the section `engine`; settings that affect learning are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidle.config.convert import yaml_text
from unidle.config.fields import coerce, section_of, unknown_key
from unidle.config.files import read_yaml
from unidle.config.machine import available_cores
from unidle.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """The hardware that engine settings depend on."""

    cores: int
    gpu: str | None  # name; None: no GPU

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return f"{cores} and {f'an {self.gpu}' if self.gpu else 'no GPU'}"


@dataclass(frozen=True)
class EngineFile:
    """The content of an engine file."""

    source: str
    values: dict[str, Any]  # engine setting → value
    machine: Machine | None  # the machine it was tuned on, if the file names one

    def note(self, gpu_name: Callable[[], str | None]) -> str | None:
        """A warning if it was tuned on a different machine; `gpu_name` returns this machine's GPU."""
        here = self.machine and Machine(available_cores(), gpu_name())
        if self.machine == here:
            return None
        return (
            f"{self.source} was tuned for {self.machine}, but this machine has {here}; run `unidle tune` to create one "
            "for this machine."
        )


def read_engine_file(path: Path) -> EngineFile:
    """The settings in an engine file; UsageError if one is not an engine setting."""
    source, tree = str(path), read_yaml(path)
    machine = _machine(tree.pop("machine", None), source)
    inner = tree.pop("engine", {})
    if not isinstance(inner, dict):
        raise UsageError(f"{source}: `engine` must contain `name: value` lines.")
    values = {str(name): value for name, value in {**tree, **inner}.items()}
    for name in values:
        section = name if name in ("recipe", "run") else section_of(name)
        if section is None:
            raise UsageError(unknown_key(name, source))
        if section != "engine":
            raise UsageError(
                f"{source}: `{name}` is not an engine setting, and an engine file may contain nothing else; give it as "
                "a flag or in --config."
            )
    return EngineFile(source, {name: coerce(name, value, source) for name, value in values.items()}, machine)


def engine_yaml(values: dict[str, Any], machine: Machine, comment: str) -> str:
    """The text of an engine file, with `comment` at the top."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    tree = {"engine": values, "machine": {"cores": machine.cores, "gpu": machine.gpu}}
    return lines + yaml_text(tree)


def _machine(value: Any, source: str) -> Machine | None:
    if value is None:
        return None
    known = isinstance(value, dict) and {"cores", "gpu"} >= value.keys() and isinstance(value.get("cores"), int)
    if not known or not isinstance(value.get("gpu"), (str, type(None))):
        raise UsageError(f"{source}: `machine` must contain `cores`, a number, and `gpu`, a name or null.")
    return Machine(value["cores"], value.get("gpu"))
