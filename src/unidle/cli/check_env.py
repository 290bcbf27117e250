"""`unidle check-env`: check an environment before training on it."""

from __future__ import annotations

import dataclasses
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


def check_env_command(argv: list[str]) -> Result:
    """`unidle check-env`"""
    flags = parse(_CheckFlags, normalise_flags(argv), "check-env")

    from unidle.envs.check_env import check_env
    from unidle.envs.make import env_maker

    report = check_env(env_maker(flags.env, flags.env_kwargs, flags.wrappers).on_host())
    if flags.json:
        return dataclasses.asdict(report)
    print(f"{flags.env} passed: {report.steps} steps, {report.episodes} episodes checked.")
    for name, value in report.facts.items():
        print(f"  {name:<12} {value}")
    for remark in report.remarks:
        print(f"  note: {remark}")
    return None
