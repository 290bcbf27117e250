"""Reads YAML config files, and finds the config of a run folder."""

from __future__ import annotations

import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from unidle.config.config import Config
from unidle.config.fields import section_of
from unidle.config.renamed import with_current_names, without_other_algorithms
from unidle.errors import UsageError

MAX_CHARACTERS = 1_000_000  # of a file
_MAX_DIGITS = 1000  # YAML 1.1 reads 1:30:00 as a number in base 60, in quadratic time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_VALUES = 100_000  # with every alias (*name) expanded


_STARTED_IN = Path.cwd()

GROUP_FILE = "group.yaml"  # in the folder of a group of runs
PBT_FILE = "pbt.yaml"  # also there, if it is a population
SWEEP_FILE = "sweep.yaml"  # in the folder of a sweep


def display_path(path: Path) -> str:
    """`path` relative to the folder in which this process started, or is now, if it is below it."""
    for folder in (_STARTED_IN, Path.cwd()):  # an environment may have changed it
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """The mapping in a YAML file, or a UsageError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); give a YAML text file.") from None
    return parse_yaml(text, str(path), loader)


def parse_yaml(text: str, source: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """The mapping in a YAML text from `source`, or a UsageError; also for a text made to exhaust memory or stack."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"{source} is longer than {MAX_CHARACTERS:,} characters; give a config file.")
    try:
        parser = loader(text)
        parser.name = source  # for its error messages
        root = parser.get_single_node()
        if root is not None and _expanded_size(root, {}) > _MAX_VALUES:
            raise UsageError(f"{source} expands to more than {_MAX_VALUES:,} values; use fewer aliases (`*name`).")
        tree = parser.construct_document(root) if root is not None else None
    except RecursionError:
        raise UsageError(f"{source} is nested too deeply; fix the file.") from None
    except UsageError:
        raise
    except Exception as error:  # YAMLError, and for a value that does not fit its tag (`!!float abc`) many others
        at = getattr(error, "problem_mark", None)
        where = f" at line {at.line + 1}" if at else ""
        raise UsageError(f"{source} is not valid YAML{where}; fix the file.") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{source} must contain `name: value` lines.")
    return tree


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values in `node`, with aliases expanded; infinite if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise ValueError("a number of too many digits")
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # while it is being expanded
        parts = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known[id(node)]


def flatten_sections(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """{'recipe': {'n_envs': 8}} → {'n_envs': 8}; UsageError for a setting in the wrong section.

    `provenance`, which describes the run that wrote the file, is left out.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "provenance":
            continue
        if key not in ("recipe", "engine", "run"):
            flat[key] = value
            continue
        if not isinstance(value, dict):
            raise UsageError(f"{source}: `{key}` must contain `name: value` lines.")
        for name, inner in value.items():
            section = section_of(name)
            if section is not None and section != key:
                raise UsageError(f"{source}: `{name}` belongs in section `{section}`, not `{key}`; move it.")
            flat[name] = inner
    return flat


def run_config_file(folder: Path) -> Path:
    """The config.yaml of a run folder; UsageError if there is none."""
    path = folder / "config.yaml"
    try:
        str(path.resolve()).encode()
        is_run = path.is_file()
    except (OSError, ValueError):
        raise UsageError(f"The path {str(folder)!r} is too long or not UTF-8; rename the run folder.") from None
    for file, what in ((GROUP_FILE, "a group of runs"), (SWEEP_FILE, "a sweep")):
        if not is_run and os.path.isfile(folder / file):
            runs = sorted(found.parent for found in folder.glob("**/config.yaml"))
            such = f", such as {display_path(runs[0])}" if runs else ""
            raise UsageError(f"{display_path(folder)} is {what}; give one of its runs{such}.")
    if not is_run:
        raise UsageError(
            f"{display_path(folder)} is not a run folder (it has no config.yaml); give a run folder, such as "
            "runs/my-run."
        )
    return path


def refuse_second_run(folder: Path) -> None:
    """UsageError if there is already a run in `folder`."""
    names = ("config.yaml", GROUP_FILE, SWEEP_FILE)
    if any(os.path.exists(folder / name) for name in names):  # False if the path is too long
        shown = display_path(folder)
        resume = f"unidle {'sweep' if os.path.exists(folder / SWEEP_FILE) else 'train'} --resume {shown}"
        raise UsageError(f"There is already a run in {shown}; choose another --run-name, or resume it: {resume}.")


def load_yaml(path: Path) -> Config:
    """The config of a run folder, as `Config.to_yaml` wrote it in this or an earlier version."""
    return config_from(read_yaml(path), str(path))


def config_from(tree: dict[str, Any], source: str) -> Config:
    """The config in the parsed text of `Config.to_yaml`."""
    values, _ = with_current_names(without_other_algorithms(flatten_sections(tree, source)))
    return Config().with_values(values, source)
