"""The help of commands that train: `--help` lists the common flags, `--help-all` every one.

With `--algo`, `--help` also lists all settings of that algorithm.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from unidle.config.field_docs import field_docs

if TYPE_CHECKING:
    from unidle.cli.job import JobFlags

_COMMON = (
    *(
        "env",
        "algo",
        "preset",
        "config",
        "timesteps",
        "seed",
        "seeds",
        "pbt",
        "n_envs",
        "device",
        "run_name",
        "runs_dir",
    ),
    *("trials", "at_once", "seeds_per_trial", "space", "sampler", "pruner", "objective"),
    *("eval_every", "resume", "budget", "seconds", "out", "quiet", "json"),
)
_MORE = "These are the most common flags: add --algo sac to see all settings of SAC, --help-all to see every flag."


def short_help(flags: JobFlags, with_recipe: bool) -> Any:
    """A dataclass instance with the common ones of `flags`, and with all those of the recipe if it is wanted."""
    parts: list[Any] = [flags, flags.run, flags.recipe, flags.engine]
    owners = {f.name: part for part in parts for f in dataclasses.fields(part)}
    names = [name for name in _COMMON if name in owners]
    fields: list[tuple[str, Any, Any]] = []
    if with_recipe:
        names = [name for name in names if owners[name] is not flags.recipe]
        fields = [(flags.recipe.algo, type(flags.recipe), dataclasses.field(default=flags.recipe))]
    common = [_field(owners[name], name) for name in names]
    kind = dataclasses.make_dataclass("Help", [*common, *fields])
    kind.__doc__ = f"{inspect.getdoc(flags)}\n\n{_MORE}"
    return kind()


def _field(part: Any, name: str) -> tuple[str, Any, Any]:
    """The field of one flag: its name, its type with its help text, and its default."""
    kind = typing.get_type_hints(type(part), include_extras=True)[name]
    value = getattr(part, name)
    hint = "" if value in (None, "") or value is False else "(default: {})"
    argument = tyro.conf.arg(help=field_docs(type(part))[name], help_behavior_hint=hint.format)
    return name, Annotated[kind, argument, tyro.conf.FlagCreatePairsOff], dataclasses.field(default=value)
