"""`unidle check-env`: check an environment before training on it."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from unidle.cli.flags import Result, normalise_flags, parse


@dataclass(frozen=True)
class _CheckFlags:
    """Check an environment for mistakes that would crash training or prevent learning."""

    env: Annotated[str, tyro.conf.Positional]
    """Gymnasium ID, or module:callable that returns an environment."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment, as YAML: '{continuous: true}'."""
    wrappers: tuple[str, ...] = ()
    """Wrappers of the environment, innermost first: --wrapper module:callable, which may be repeated."""
    json: bool = False
    """Print the result as a JSON object."""


_QUIET_SECONDS = 1.5  # a check that takes longer shows progress
_LIVE_SECONDS, _LINE_SECONDS = 0.2, 5.0  # between two updates, in a terminal and elsewhere


class _Progress:
    """Shows the progress of a slow check on standard error."""

    def __init__(self) -> None:
        self._is_live, self._is_shown = sys.stderr.isatty(), False
        self._next = time.monotonic() + _QUIET_SECONDS

    def on_step(self, done: int, total: int) -> None:
        """Show the progress if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        start, end = ("\r", "") if self._is_live else ("", "\n")
        print(f"{start}checking: step {done} of {total}", end=end, file=sys.stderr, flush=True)
        self._next, self._is_shown = now + (_LIVE_SECONDS if self._is_live else _LINE_SECONDS), True

    def clear(self) -> None:
        """Remove the progress from a terminal."""
        if self._is_live and self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def check_env_command(argv: list[str]) -> Result:
    """`unidle check-env`"""
    flags = parse(_CheckFlags, normalise_flags(argv), "check-env")

    from unidle.envs.check_env import check_env
    from unidle.envs.make import env_maker

    progress = _Progress()
    try:
        report = check_env(env_maker(flags.env, flags.env_kwargs, flags.wrappers).on_host(), progress=progress.on_step)
    finally:
        progress.clear()
    if flags.json:
        return dataclasses.asdict(report)
    print(f"{flags.env} passed: {report.steps} steps, {report.episodes} episodes checked.")
    for name, value in report.facts.items():
        print(f"  {name:<12} {value}")
    for remark in report.remarks:
        print(f"  note: {remark}")
    return None
