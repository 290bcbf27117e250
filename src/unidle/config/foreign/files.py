"""Reads a user's config file in the format of unidle, SB3, rl-zoo, Isaac Lab or ElegantRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unidle.config.fields import coerce, section_of, unknown_key
from unidle.config.files import flatten_sections, read_yaml
from unidle.config.foreign import elegantrl, rl_zoo, sb3, sb3_off_policy, sb3_sde
from unidle.config.foreign.algorithm import algorithm_of, is_recurrent
from unidle.config.renamed import with_current_names, without_other_algorithms
from unidle.config.settings import OffPolicyRecipe, Recipe
from unidle.errors import UsageError

Style = Literal["unidle", "sb3", "elegantrl"]

_SECTIONS = ("recipe", "engine", "run")

_RENAMED = {**sb3.RENAMED, **elegantrl.RENAMED}


@dataclass(frozen=True)
class ConvertedConfig:
    """A config file converted to unidle's settings."""

    values: dict[str, Any]  # flat setting → value
    notes: list[str]  # a message for each setting that is ignored or changes its meaning
    base_preset: str | None  # preset for settings that the file does not give; None: the user's choice


def read_config(
    path: Path, env: str | None = None, n_envs: int | None = None, algo: str | None = None
) -> ConvertedConfig:
    """The settings of a config file; `env` selects an rl-zoo entry, and `n_envs` overrides the file.

    A file of Stable-Baselines3 does not name its algorithm: it is `algo`, or found by `algorithm_of`.
    """
    source = str(path)
    tree = read_yaml(path, rl_zoo.PlainLoader)
    entry = rl_zoo.choose_entry(tree, env, source) if rl_zoo.is_zoo(tree) else None
    if entry is not None:
        tree = tree[entry]
    style = "sb3" if entry is not None else _style(tree)
    conversion = _Conversion(
        source, style, algorithm_of(path, tree, algo) if style == "sb3" else "ppo", entry is not None
    )
    if style == "sb3" and is_recurrent(path):
        conversion.values["recurrent"] = "lstm"
    values = flatten_sections(tree, source)
    if style == "unidle":
        values, renamings = with_current_names(without_other_algorithms(values))
        conversion.notes += renamings
    for key, value in values.items():
        conversion.convert(str(key), value)
    if entry is not None and rl_zoo.ENV_ID.search(entry):  # not a group such as `atari`
        conversion.values.setdefault("env", entry)
    return conversion.finish(n_envs)


def convert_sb3_arguments(algo: str, arguments: dict[str, Any], n_envs: int) -> ConvertedConfig:
    """The settings for the arguments of Stable-Baselines3's class for `algo`, which are plain values."""
    return _converted_arguments(algo, arguments).finish(n_envs)


def sb3_values(algo: str, arguments: dict[str, Any], recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """The settings for arguments that change those of `recipe`, and messages about them."""
    scheduled = {key: value for key, value in arguments.items() if key in sb3_off_policy.KEYS and algo != "ppo"}
    conversion = _converted_arguments(algo, {key: arguments[key] for key in arguments.keys() - scheduled.keys()})
    if isinstance(recipe, OffPolicyRecipe) and scheduled:
        known = sb3_off_policy.arguments_of(recipe)
        conversion.values |= sb3_off_policy.schedule(algo, known | scheduled, recipe.n_envs, algo.upper())
    return conversion.values, conversion.notes


def _converted_arguments(algo: str, arguments: dict[str, Any]) -> _Conversion:
    conversion = _Conversion(algo.upper(), "sb3", algo, limits_batch_size=True)
    for key, value in arguments.items():
        conversion.convert(key, value)
    return conversion


# -- detecting the format


def _style(tree: dict[str, Any]) -> Style:
    if any(name in _SECTIONS for name in tree):
        return "unidle"
    if sb3.MARKS & tree.keys() or any(map(sb3.is_linear, tree.values())):
        return "sb3"
    return "elegantrl" if elegantrl.MARKS & tree.keys() else "unidle"


# -- converting settings


@dataclass
class _Conversion:
    """A config file during conversion to unidle's settings."""

    source: str
    style: Style
    algo: str  # of a Stable-Baselines3 file
    limits_batch_size: bool = False  # to the rollout, as Stable-Baselines3 does
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # for settings that the file does not give
    schedule: dict[str, Any] = field(default_factory=dict)  # of off-policy algorithms, converted together
    per_iteration: dict[str, int] = field(default_factory=dict)  # needs n_envs, so converted last

    def convert(self, key: str, value: Any) -> None:
        """Convert one setting of the file."""
        if self.style == "sb3" and self.algo != "ppo" and key == "n_steps":
            self._set("n_step", key, value)  # n-step returns; a rollout's length follows from `train_freq`
        elif self.style == "sb3" and self.algo != "ppo" and key in sb3_off_policy.KEYS:
            self.schedule[key] = value
        elif key == "target_step" or (key == "n_minibatches" and self.style == "sb3"):
            self.per_iteration[key] = self._count(key, value)
        elif self.style == "sb3" and key in sb3.READERS:
            for name, plain in sb3.READERS[key](value, self.source, self.notes, self.algo).items():
                if name == "net_arch" and key == "policy":
                    self.defaults[name] = plain
                else:
                    self._set(name, key, plain)
        elif section_of(key):
            self._set(key, key, value)
        elif key in elegantrl.RENAMED or (key in _RENAMED and self.style != "unidle"):
            self._set(_RENAMED[key], key, value)
        elif self.style == "unidle":
            raise UsageError(unknown_key(key, self.source))
        elif self.style == "sb3":
            sb3.refuse(key, value, self.source)
        else:
            sb3.note_ignored(key, value, self.notes)

    def finish(self, n_envs: int | None) -> ConvertedConfig:
        """The result, once every setting is converted."""
        if self.style == "sb3":
            if self.values.get("recurrent") == "lstm":
                # Defaults of sb3-contrib's RecurrentPPO that differ from PPO's.
                contrib = {"n_steps": 128, "batch_size": 128, "recurrent_size": 256}
                self.values = {**contrib, **self.values}
            if n_envs is None and "n_envs" not in self.values and self.algo == "ppo":
                self.notes.append("`n_envs` is not in the file; using 1, or the --preset's, unless you give --n-envs.")
        known_envs = n_envs or self.values.get("n_envs")
        if "target_step" in self.per_iteration:
            self._convert_target_step(self.per_iteration["target_step"], known_envs)
        if "n_minibatches" in self.per_iteration:
            self._convert_n_minibatches(self.per_iteration["n_minibatches"], known_envs)
        if self.style != "sb3":
            return ConvertedConfig(self.values, self.notes, self.values.get("preset"))
        if self.limits_batch_size and self.algo == "ppo":
            self._limit_batch_size((known_envs or 1) * self.values.get("n_steps", 2048))
        for name in sb3_sde.without_effect(self.values, self.algo):
            del self.values[name]
        # Settings missing from such a file have Stable-Baselines3's defaults.
        values = {**self.defaults, **self.values}
        if self.algo != "ppo":
            schedule = sb3_off_policy.schedule(self.algo, self.schedule, known_envs or 1, self.source)
            schedule = {name: coerce(name, value, self.source, self.algo) for name, value in schedule.items()}
            defaults = sb3_off_policy.DEFAULTS[self.algo]
            values = {"algo": self.algo, "n_envs": 1, **defaults, **schedule, **values}
        base = "classic" if self.algo == "ppo" else self.algo
        return ConvertedConfig(values, self.notes, self.values.get("preset", base))

    def _limit_batch_size(self, total: int) -> None:
        """As Stable-Baselines3 does: a batch is at most the rollout."""
        if self.values.get("batch_size", 0) > total:
            self.notes.append(
                f"`batch_size` {self.values['batch_size']} becomes {total}, the transitions of a rollout."
            )
            self.values["batch_size"] = total

    def _set(self, name: str, key: str, value: Any) -> None:
        value = coerce(name, value, self.source)
        if self.values.setdefault(name, value) != value:
            raise UsageError(
                f"{self.source}: `{key}` sets `{name}` to {value}, but another line sets it to {self.values[name]}; "
                "keep one."
            )

    def _count(self, key: str, value: Any) -> int:
        try:
            count = int(coerce("n_steps", value, self.source))  # any integer setting has the right type
        except UsageError:
            count = 0
        if count < 1:
            raise UsageError(f"{self.source}: `{key}` must be a positive integer, not {value!r}.")
        return count

    def _convert_target_step(self, target_step: int, n_envs: int | None) -> None:
        if "n_steps" in self.values:
            self.notes.append("`target_step` is ignored because the file also gives `n_steps`.")
        elif not n_envs:
            self.notes.append(
                "`target_step` is ignored: it is n_envs × n_steps, but `n_envs` is unknown; give --n-envs."
            )
        else:
            self.values["n_steps"] = max(1, target_step // n_envs)
            total = self.values["n_steps"] * n_envs
            if total != target_step:
                self.notes.append(f"`target_step` {target_step} becomes {total}, a multiple of n_envs {n_envs}.")

    def _convert_n_minibatches(self, n_minibatches: int, n_envs: int | None) -> None:
        if n_envs is None:
            raise UsageError(
                f"{self.source} gives `n_minibatches` but not `n_envs`, on which the batch size depends too; "
                "add --n-envs."
            )
        total = n_envs * self.values.get("n_steps", 2048)  # SB3's default
        # As in Isaac Lab, this overrides a batch_size in the file.
        self.values["batch_size"] = max(1, total // n_minibatches)
