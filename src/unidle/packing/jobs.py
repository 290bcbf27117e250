"""The jobs of a pack: from a jobs.yaml, or from the command line."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidle.config.convert import in_brief
from unidle.config.files import read_yaml
from unidle.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it names a file
_SHELL_WORDS = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1"}
_UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


@dataclass(frozen=True)
class Job:
    """One command and what it needs."""

    name: str
    command: tuple[str, ...]
    cores: int | None = None
    """None: an equal share of those that the other jobs leave."""
    gpu_memory: int | None = None
    """Bytes; None: not known."""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path()

    def environment(self) -> dict[str, str]:
        """The environment variables of its processes, before what packing adds."""
        return {**os.environ, **self.env}

    def require_program(self) -> None:
        """UsageError if its folder or its program does not exist."""
        if not self.cwd.is_dir():
            raise UsageError(f"Job `{self.name}`: there is no folder {self.cwd}; correct its `cwd`.")
        program = self.command[0]
        where = str(self.cwd / program) if "/" in program else program
        if shutil.which(where, path=self.environment().get("PATH")) is None:
            raise UsageError(
                f"Job `{self.name}`: program `{program}` not found; check the command, which starts with a program: "
                "python train.py."
            )


_KEYS = [f.name for f in dataclasses.fields(Job)]


def jobs_from_arguments(argv: Sequence[str]) -> list[Job]:
    """The jobs in `-- command … -- command …`, named job-1, job-2, …"""
    commands: list[list[str]] = []
    for word in argv:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    if not all(commands):
        raise UsageError("There is no command after a `--`; use: unidle pack -- python a.py -- python b.py.")
    return [Job(f"job-{number}", tuple(command)) for number, command in enumerate(commands, 1)]


def read_jobs(path: Path) -> list[Job]:
    """The jobs in a jobs.yaml."""
    source = str(path)
    if path.is_file() and not path.read_bytes().strip():
        raise UsageError(f"{source} is empty; list the jobs under `jobs:`, each with `name` and `command`.")
    tree = read_yaml(path)
    for key in tree:
        if key != "jobs":
            raise _unknown_key(source, str(key), ["jobs"])
    entries = tree.get("jobs")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{source} has no jobs; list them under `jobs:`, each with `name` and `command`.")
    jobs = [_read_job(entry, source, number) for number, entry in enumerate(entries, 1)]
    names = [job.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{source} has {names.count(name)} jobs named `{name}`; give each its own name.")
    return jobs


def _read_job(entry: Any, path: str, number: int) -> Job:
    source = f"{path}, job {number}"
    if not isinstance(entry, dict):
        raise UsageError(f"{source} is {in_brief(entry)}; write `name: …` and `command: …`.")
    for key in entry:
        if key not in _KEYS:
            raise _unknown_key(source, str(key), _KEYS)
    for key in ("name", "command"):
        if entry.get(key) in (None, "", []):
            raise UsageError(f"{source} has no `{key}`; add it.")
    name = entry["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{source}: `name` is {in_brief(name)}; use letters, digits and . _ -, such as seed-1.")
    source = f"{path}, job `{name}`"
    return Job(
        name,
        _command(entry["command"], source),
        _cores(entry.get("cores"), source),
        _bytes(entry.get("gpu_memory"), source),
        _environment(entry.get("env"), source),
        _folder(entry.get("cwd"), source),
    )


def _command(value: Any, source: str) -> tuple[str, ...]:
    if isinstance(value, list):
        if not all(isinstance(word, (str, int, float)) and not isinstance(word, bool) for word in value):
            raise UsageError(f"{source}: `command` is {in_brief(value)}; write its words as text.")
        return tuple(map(str, value))
    if not isinstance(value, str):
        raise UsageError(f"{source}: `command` is {in_brief(value)}; write a command, such as python train.py.")
    try:
        words = shlex.split(value)
    except ValueError:
        raise UsageError(f"{source}: `command` has an unclosed quote; close it.") from None
    if shell := _SHELL_WORDS & set(words):
        raise UsageError(
            f"{source}: `command` is not run by a shell, so it cannot use `{min(shell)}`; write: bash -c '…'."
        )
    return tuple(words)


def _cores(value: Any, source: str) -> int | None:
    if value is None or (type(value) is int and value >= 1):
        return value
    raise UsageError(f"{source}: `cores` is {in_brief(value)}; write how many, from 1.")


def _bytes(value: Any, source: str) -> int | None:
    if value is None:
        return None
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if not found or found[2] not in _UNITS or float(found[1]) == 0:
        raise UsageError(f"{source}: `gpu_memory` is {in_brief(value)}; write it in GiB, or as 500 MB or 4 GB.")
    return round(float(found[1]) * _UNITS[found[2]])


def _environment(value: Any, source: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{source}: `env` is {in_brief(value)}; write `NAME: value` lines.")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"{source}: `env` has {in_brief(name)}, which cannot be a variable's name; correct it.")
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or "\0" in str(text):
            raise UsageError(f"{source}: `{name}` in `env` is {in_brief(text)}; write the value in quotes.")
    return {name: str(text) for name, text in value.items()}


def _folder(value: Any, source: str) -> Path:
    if value is None:
        return Path()
    if not isinstance(value, str) or not value:
        raise UsageError(f"{source}: `cwd` is {in_brief(value)}; write a folder.")
    return Path(value).expanduser()


def _unknown_key(source: str, key: str, known: list[str]) -> UsageError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"use {', '.join(known)}."
    return UsageError(f"{source} has an unknown key `{key[:100]}`; {hint}")
