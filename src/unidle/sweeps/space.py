"""The search space of a sweep: which settings are searched, and over what.

A space is a mapping from settings to a range, {low, high} with options, or to a list of choices; see docs/sweep.md.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from unidle.config import Config
from unidle.config.convert import MISMATCH, convert, in_brief
from unidle.config.fields import coerce, section_of, unknown_key
from unidle.config.files import read_yaml
from unidle.config.validate import nearest_divisors, validated
from unidle.errors import UsageError

_FOLDER = Path(__file__).parent / "spaces"
_MANY_ENVS = 16  # from which on the rollout is that of the preset
_LEAST_ITERATIONS = 10  # of a trial in a default space
_OPTIONS = ("log", "one_minus", "power_of_2")  # of a range, true or false
_NOT_SEARCHED = ("algo", "network", "n_tasks")
_TOTAL_BATCH = "total_batch"  # n_envs × n_steps: searched in place of n_steps
_CHECKED_COMBINATIONS = 200

Choice = bool | int | float | str | None  # what Optuna stores


class Suggests(Protocol):
    """What a space needs of a trial of Optuna."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number between `low` and `high`."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer between `low` and `high`."""

    def suggest_categorical(self, name: str, choices: Sequence[Choice]) -> Choice:
        """One of `choices`."""


@dataclass(frozen=True)
class Range:
    """A setting searched between two numbers."""

    name: str
    low: int | float  # integers if the setting is one
    high: int | float
    step: int | None = None  # of integers
    log: bool = False
    one_minus: bool = False  # search 1 − value, as for γ
    power_of_2: bool = False

    @property
    def parameter(self) -> str:
        """The name of what Optuna searches."""
        prefix = "log2_" if self.power_of_2 else "one_minus_" if self.one_minus else ""
        return prefix + self.name

    @property
    def setting(self) -> str:
        """The setting that it decides."""
        return _setting(self.name)

    @property
    def _bounds(self) -> tuple[int | float, int | float]:
        """The ends of what Optuna searches."""
        if self.power_of_2:
            return int(self.low).bit_length() - 1, int(self.high).bit_length() - 1
        return (1 - self.high, 1 - self.low) if self.one_minus else (self.low, self.high)

    def suggest(self, trial: Suggests) -> int | float:
        """The value for a trial."""
        low, high = self._bounds
        if isinstance(low, int) and isinstance(high, int):
            step = self.step or 1
            found = trial.suggest_int(self.parameter, low, high - (high - low) % step, step=step, log=self.log)
            return 2**found if self.power_of_2 else found
        value = trial.suggest_float(self.parameter, low, high, log=self.log)
        return 1 - value if self.one_minus else value

    def fraction(self, parameter: float) -> float:
        """Where a parameter lies between `low` (0) and `high` (1), on the scale that is searched."""
        scale = math.log if self.log else float
        low, high = (scale(end) for end in self._bounds)
        share = (scale(parameter) - low) / (high - low)
        return 1 - share if self.one_minus else share

    @property
    def ends(self) -> list[Any]:
        """Values that are valid if all of them are."""
        return [self.low, self.high]


@dataclass(frozen=True)
class Choices:
    """A setting searched among a few values."""

    name: str
    ends: list[Any]

    @property
    def parameter(self) -> str:
        """The name of what Optuna searches."""
        return self.name

    @property
    def setting(self) -> str:
        """The setting that it decides."""
        return _setting(self.name)

    def suggest(self, trial: Suggests) -> Any:
        """The value for a trial."""
        labels = {_label(value): value for value in self.ends}
        return labels[trial.suggest_categorical(self.name, list(labels))]

    def fraction(self, parameter: Choice) -> float:
        """Where a choice lies between the first (0) and the last (1)."""
        labels = [_label(value) for value in self.ends]
        return labels.index(parameter) / (len(labels) - 1) if len(labels) > 1 else 0.5


def _setting(name: str) -> str:
    return "n_steps" if name == _TOTAL_BATCH else name


def _label(value: Any) -> Choice:
    """A choice as Optuna stores it: [64, 64] as 64,64."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Space:
    """The settings that a sweep searches."""

    dimensions: tuple[Range | Choices, ...]
    plain: dict[str, Any]  # as in the file

    def suggest(self, trial: Suggests) -> dict[str, Any]:
        """The settings of a trial; for a trial that has them already, these."""
        return {dimension.name: dimension.suggest(trial) for dimension in self.dimensions}

    def check(self, base: Config, source: str) -> None:
        """UsageError if a value, or a combination of values, is not valid for the job."""
        for values in self._combinations():
            try:
                trial_config(base, values)
            except UsageError as error:
                raise UsageError(f"{source}: {error}") from None

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for dimension in self.dimensions:
            yield from ({dimension.name: value} for value in dimension.ends)
        draw = random.Random(0)
        for _ in range(_CHECKED_COMBINATIONS):
            yield {dimension.name: draw.choice(dimension.ends) for dimension in self.dimensions}


def trial_config(base: Config, values: dict[str, Any]) -> Config:
    """The validated config of a trial: `base` with these settings, and a batch size that divides its rollout."""
    config = base.with_values({name: value for name, value in values.items() if name != _TOTAL_BATCH}, "the space")
    recipe = config.recipe
    if _TOTAL_BATCH in values:
        recipe = dataclasses.replace(recipe, n_steps=max(1, round(values[_TOTAL_BATCH] / recipe.n_envs)))
    if recipe.on_policy and isinstance(recipe.batch_size, int) and recipe.batch_size > 0:
        below, above = nearest_divisors(recipe.total_batch, recipe.batch_size)
        recipe = dataclasses.replace(recipe, batch_size=below if below > 1 else above)
    return validated(dataclasses.replace(config, recipe=recipe))


def read_space(given: Path | Mapping[str, Any] | None, base: Config, fixed: Collection[str] = ()) -> Space:
    """The space in a file or a mapping, one of unidle's by its name, or the default one; checked with the job `base`.

    `fixed` are settings that the user gave: a space of unidle's leaves them out.
    """
    if given is None:
        source, found = _own_space(_default_name(base), base, fixed)
    elif isinstance(given, Path) and is_own(given):
        source, found = _own_space(str(given), base, fixed)
    elif isinstance(given, Path):
        source, found = str(given), read_yaml(given)
    else:
        source, found = "`space`", dict(given)
    if not found:
        raise UsageError(f"{source} leaves nothing to search; name at least one setting in a space of your own.")
    for name in found:
        if _setting(name) in fixed:
            raise UsageError(f"{source}: `{name}` is searched, but also given as a setting; remove one of the two.")
    if _TOTAL_BATCH in found and "n_steps" in found:
        raise UsageError(f"{source}: `{_TOTAL_BATCH}` is n_envs × n_steps; search it or `n_steps`, not both.")
    space = Space(tuple(_dimension(name, value, base.recipe.algo, source) for name, value in found.items()), found)
    space.check(base, source)
    return space


def is_own(given: Path | Mapping[str, Any] | None) -> bool:
    """Whether a space is one of unidle's: the default one, or one given by its name."""
    if isinstance(given, Path):
        return not given.exists() and str(given) in [file.stem for file in _FOLDER.glob("*.yaml")]
    return given is None


def own_space(base: Config, fixed: Collection[str]) -> dict[str, Any]:
    """What the default space of a job searches."""
    return _own_space(_default_name(base), base, fixed)[1]


def _default_name(base: Config) -> str:
    """The name of the default space of a job."""
    algo = str(base.recipe.algo)
    return f"{algo}-many-envs" if algo == "ppo" and base.recipe.n_envs >= _MANY_ENVS else algo


def _own_space(name: str, base: Config, fixed: Collection[str]) -> tuple[str, dict[str, Any]]:
    """What one of unidle's spaces is called in messages, and what it searches."""
    recipe = base.recipe
    space = read_yaml(_FOLDER / f"{name}.yaml")
    found = {key: value for key, value in space.items() if _setting(key) not in fixed}
    if "n_steps" in found:  # a longer rollout would leave too few iterations
        longest = max(1, base.run.timesteps // (_LEAST_ITERATIONS * recipe.n_envs))
        found["n_steps"]["high"] = min(found["n_steps"]["high"], 2 ** (longest.bit_length() - 1))
        if found["n_steps"]["high"] <= found["n_steps"]["low"]:
            del found["n_steps"]
    return f"space {name}", found


def _dimension(name: str, value: Any, algo: str, source: str) -> Range | Choices:
    if name == _TOTAL_BATCH:
        if algo != "ppo":
            raise UsageError(f"{source}: `{name}` is a size of PPO's rollout; remove it, or use --algo ppo.")
        return replace(_dimension("n_steps", value, algo, source), name=name)
    section = section_of(name)
    if section is None:
        raise UsageError(unknown_key(name, source))
    if section != "recipe" or name in _NOT_SEARCHED:
        raise UsageError(f"{source}: `{name}` cannot be searched; a sweep searches settings that affect learning.")
    if isinstance(value, list):
        return _choices(name, value, algo, source)
    if isinstance(value, dict):
        return _range(name, value, algo, source)
    raise UsageError(
        f"{source}: `{name}` is {in_brief(value)}; give a range, {{low: 0.1, high: 0.4}}, or a list of choices."
    )


def _choices(name: str, values: list[Any], algo: str, source: str) -> Choices:
    coerced = [coerce(name, value, source, algo) for value in values]
    if not coerced or len({_label(value) for value in coerced}) < len(coerced):
        raise UsageError(f"{source}: `{name}` needs one or more different choices.")
    if any(isinstance(value, dict) for value in coerced):
        raise UsageError(f"{source}: `{name}` cannot be searched; its choices are mappings.")
    return Choices(name, coerced)


def _range(name: str, given: dict[str, Any], algo: str, source: str) -> Range:
    known = ("low", "high", "step", *_OPTIONS)
    if unknown := [key for key in given if key not in known]:
        raise UsageError(f"{source}: a range has no `{unknown[0]}` (`{name}`); use {', '.join(known)}.")
    if not {"low", "high"} <= given.keys():
        raise UsageError(f"{source}: `{name}` needs both `low` and `high`.")
    if wrong := [key for key in _OPTIONS if not isinstance(given.get(key, False), bool)]:
        raise UsageError(f"{source}: `{wrong[0]}` of `{name}` must be true or false.")
    low, high = (coerce(name, given[key], source, algo) for key in ("low", "high"))
    if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in (low, high)):
        raise UsageError(f"{source}: `{name}` is not a number; give a list of choices.")
    space = Range(name, low, high, _step(name, given.get("step"), source), *(given.get(key, False) for key in _OPTIONS))
    if wrong_range := _why_wrong(space):
        raise UsageError(f"{source}: `{name}` goes from {low} to {high}; {wrong_range}.")
    return space


def _step(name: str, given: Any, source: str) -> int | None:
    step = None if given is None else convert(given, int)
    if step is MISMATCH or (step is not None and step < 1):
        raise UsageError(f"{source}: `step` of `{name}` is {in_brief(given)}; it must be an integer of at least 1.")
    return step


def _why_wrong(given: Range) -> str | None:
    low, high, is_integer = given.low, given.high, isinstance(given.low, int) and isinstance(given.high, int)
    if not low < high:
        return "`low` must be below `high`"
    if high == float("inf"):
        return "both ends must be finite"
    if given.step is not None and (not is_integer or given.log or given.power_of_2):
        return "`step` is for integers, without `log` or `power_of_2`"
    if given.power_of_2 and not (is_integer and low > 0 and low & (low - 1) == 0 == high & (high - 1)):  # type: ignore[operator]
        return "with `power_of_2`, both ends must be powers of 2"
    if given.power_of_2 and (given.log or given.one_minus):
        return "`power_of_2` goes with neither `log` nor `one_minus`"
    if given.one_minus and (is_integer or (given.log and high >= 1)):
        return "with `one_minus`, both ends must be fractions, and below 1 if `log` is true"
    if given.log and not given.one_minus and low <= 0:
        return "with `log`, `low` must be above 0"
    return None
