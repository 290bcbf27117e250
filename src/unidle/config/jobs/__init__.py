"""Named jobs: the YAML files in this folder, each what it trains and what it asks of SLURM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unidle.config.files import read_yaml
from unidle.config.presets import Preset, load_preset
from unidle.errors import UsageError

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class NamedJob:
    """What a job trains, and what it asks of SLURM."""

    name: str
    description: str
    train: Mapping[str, str]  # setting → value, as flags of `unidle train`
    slurm: Mapping[str, str]  # option of `unidle slurm` → value

    @property
    def preset(self) -> Preset:
        """The preset that it trains."""
        return load_preset(self.train["preset"])

    @property
    def flags(self) -> list[str]:
        """The flags of `unidle train`."""
        return [word for name, value in self.train.items() for word in (f"--{name.replace('_', '-')}", value)]


def job_names() -> list[str]:
    """The names of all named jobs."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_job(name: str) -> NamedJob:
    """The named job of that name, or a UsageError that lists the names."""
    if name not in job_names():
        raise UsageError(f"There is no job `{name}`; choose one of {', '.join(job_names())}.")
    tree = read_yaml(_FOLDER / f"{name}.yaml")
    return NamedJob(name, tree["description"], tree["train"], tree["slurm"])
