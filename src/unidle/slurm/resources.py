"""What a job asks of SLURM: its time limit and the other options of sbatch, checked before anything is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from unidle.config.convert import in_brief
from unidle.errors import UsageError

_UNLIMITED = ("unlimited", "infinite")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# sbatch's forms of --time, with the seconds of each part.
_FORMS = (
    (r"(\d+)", (_MINUTE,)),
    (r"(\d+):(\d+)", (_MINUTE, 1)),
    (r"(\d+):(\d+):(\d+)", (_HOUR, _MINUTE, 1)),
    (r"(\d+)-(\d+)", (_DAY, _HOUR)),
    (r"(\d+)-(\d+):(\d+)", (_DAY, _HOUR, _MINUTE)),
    (r"(\d+)-(\d+):(\d+):(\d+)", (_DAY, _HOUR, _MINUTE, 1)),
)


@dataclass(frozen=True)
class Resources:
    """Options of sbatch."""

    time: str
    cpus_per_task: int
    signal: int  # seconds before the time limit at which a checkpoint is saved
    partition: str | None = None
    gres: str | None = None
    mem: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    more: str = ""  # options as the user wrote them

    def check(self) -> None:
        """UsageError if SLURM would refuse them, or end the job before it can save a checkpoint."""
        seconds = seconds_of_limit(self.time)
        if self.signal < 1:
            raise UsageError(f"--signal is {self.signal}; use the seconds that saving a checkpoint may take.")
        if self.cpus_per_task < 1:
            raise UsageError(f"--cpus-per-task is {self.cpus_per_task}; a job needs at least 1.")
        if seconds is not None and seconds <= self.signal:
            raise UsageError(
                f"A time limit of {seconds} seconds is too short: the checkpoint is saved {self.signal} seconds before "
                "it; ask for more --time, or lower --signal."
            )
        try:
            shlex.split(self.more)
        except ValueError:
            raise UsageError("--sbatch has an unclosed quote; close it.") from None

    def options(self) -> Iterator[tuple[str, str]]:
        """Names and values of the options of sbatch, in the order of the script."""
        for name in ("partition", "account", "qos", "constraint", "gres", "mem"):
            value = getattr(self, name)
            if value is not None:
                yield name, value
        yield "nodes", "1"
        yield "ntasks", "1"
        yield "cpus-per-task", str(self.cpus_per_task)
        yield "time", self.time
        for word in shlex.split(self.more):
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                raise UsageError(f"--sbatch has `{word}`; write each option as --name or --name=value.")
            yield name, value if equals else ""


def seconds_of_limit(text: str) -> int | None:
    """The seconds of a time limit in one of sbatch's forms; None if it is unlimited. UsageError if it is in none."""
    if text.lower() in _UNLIMITED:
        return None
    for form, units in _FORMS:
        if found := re.fullmatch(form, text, re.ASCII):
            seconds = sum(int(part) * unit for part, unit in zip(found.groups(), units))
            if seconds == 0:
                return None  # as sbatch reads it
            return -(-seconds // _MINUTE) * _MINUTE  # SLURM counts whole minutes
    raise UsageError(f"--time is {in_brief(text)}; write hours:minutes:seconds (8:00:00) or days-hours (2-12).")


@dataclass(frozen=True)
class Array:
    """A job array: its kind (seeds or jobs), its task ids, and what sbatch's --array is."""

    kind: str
    ids: tuple[int, ...]
    given: str  # 1-10, 1,2,5 or 1-10%3


def array_of(text: str) -> Array:
    """The array in `seeds=1-10`, `seeds=1,2,5`, `seeds=1-10%3` (three at a time) or `jobs=4`."""
    kind, _, given = text.partition("=")
    if kind == "jobs" and _is_count(given):
        return Array(kind, tuple(range(1, int(given) + 1)), f"1-{given}")
    listed, percent, at_once = given.partition("%")
    ids: list[int] = []
    for part in listed.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        if kind != "seeds" or found is None or int(found[2] or found[1]) < int(found[1]):
            ids = []
            break
        ids += range(int(found[1]), int(found[2] or found[1]) + 1)
    if not ids or (percent and not _is_count(at_once)):
        raise UsageError(
            f"--array is {in_brief(text)}; use seeds=1-10, seeds=1,2,5 or seeds=1-10%3 (three at a time), and for a "
            "sweep jobs=4."
        )
    return Array(kind, tuple(ids), given)


def _is_count(text: str) -> bool:
    """Whether it is a number from 1 on, in digits that sbatch reads."""
    return text.isascii() and text.isdecimal() and int(text) >= 1
