"""The folder of a group: group.yaml, a page about all runs, and each run in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from unidle.config import Config
from unidle.config.files import GROUP_FILE, display_path, read_yaml
from unidle.config.validate import check_seed
from unidle.errors import UsageError
from unidle.writing import write_atomically

_MAX_RUNS = 1024


class GroupFolder:
    """`runs/<group>/`: group.yaml, report.html, seed-1/, seed-2/, …."""

    def __init__(self, path: Path, seeds: Sequence[int]) -> None:
        self.path, self.seeds = path, tuple(seeds)
        self.runs = [path / f"seed-{seed}" for seed in seeds]

    @staticmethod
    def create(path: Path, seeds: Sequence[int]) -> GroupFolder:
        """A new group in the empty folder `path`."""
        write_atomically(path / GROUP_FILE, yaml.safe_dump({"seeds": list(seeds)}, sort_keys=False))
        return GroupFolder(path, seeds)

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether `path` is the folder of a group."""
        return (path / GROUP_FILE).is_file()

    @staticmethod
    def open(path: Path) -> GroupFolder:
        """The folder of an earlier group; UsageError if it is not one."""
        if not GroupFolder.is_one(path):
            raise UsageError(f"{display_path(path)} is not the folder of a group: it has no {GROUP_FILE}.")
        seeds = read_yaml(path / GROUP_FILE).get("seeds")
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise UsageError(f"{display_path(path / GROUP_FILE)} lists no seeds; restore it, or start a new group.")
        return GroupFolder(path, seeds)


def seeds_from(given: int | str | Sequence[int], config: Config) -> tuple[int, ...]:
    """The seeds that `--seeds` asks for: so many from the config's seed on (8), or a list (1,2,5)."""
    if isinstance(given, str):
        try:
            numbers = [int(part) for part in given.split(",")]
        except ValueError:
            raise UsageError(f"--seeds is {given!r}; use a number of runs (8) or a list of seeds (1,2,5).") from None
        given = numbers[0] if "," not in given else numbers
    if isinstance(given, int):
        if not 1 <= given <= _MAX_RUNS:
            raise UsageError(f"`seeds` is {given}; train 1 to {_MAX_RUNS:,} runs at a time.")
        given = range(config.run.seed, config.run.seed + given)
    seeds = tuple(given)
    for seed in seeds:
        check_seed(seed)
    if not 1 <= len(seeds) <= _MAX_RUNS or len(set(seeds)) < len(seeds):
        raise UsageError(f"`seeds` needs 1 to {_MAX_RUNS:,} different seeds.")
    return seeds
