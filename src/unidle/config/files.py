"""Reads YAML config files, and finds the config of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from unidle.config.config import Config
from unidle.config.fields import section_of
from unidle.config.renamed import with_current_names, without_other_algorithms
from unidle.errors import UsageError


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """The mapping in a YAML file, or a UsageError."""
    try:
        with path.open(encoding="utf-8") as text:
            tree = yaml.load(text, Loader=loader)
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); give a YAML text file.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: `!!float abc`
        at = getattr(error, "problem_mark", None)
        where = f" at line {at.line + 1}" if at else ""
        raise UsageError(f"{path} is not valid YAML{where}; fix the file.") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path} must contain `name: value` lines.")
    return tree


def flatten_sections(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """{'recipe': {'n_envs': 8}} → {'n_envs': 8}; UsageError for a setting in the wrong section."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
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
    if not path.exists():
        raise UsageError(
            f"{folder} is not a run folder (it has no config.yaml); give a run folder, such as runs/my-run."
        )
    return path


def refuse_second_run(folder: Path) -> None:
    """UsageError if there is already a run in `folder`."""
    if (folder / "config.yaml").exists():
        raise UsageError(
            f"There is already a run in {folder}; resume it with --resume {folder}, or choose another --run-name."
        )


def load_yaml(path: Path) -> Config:
    """The config of a run folder, as `Config.to_yaml` wrote it in this or an earlier version."""
    values = without_other_algorithms(flatten_sections(read_yaml(path), str(path)))
    values, _ = with_current_names(values)
    return Config().with_values(values, str(path))
