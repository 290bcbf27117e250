"""Reads a user's config file in the format of unidle, SB3, rl-zoo, Isaac Lab or ElegantRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unidle.config.fields import coerce, section_of, unknown_key
from unidle.config.files import flatten_sections, read_yaml
from unidle.config.foreign import elegantrl, rl_zoo, sb3
from unidle.config.renamed import with_current_names, without_other_algorithms
from unidle.errors import UsageError

Style = Literal["unidle", "sb3", "elegantrl"]

_SECTIONS = ("recipe", "engine", "run")

_RENAMED = {**sb3.RENAMED, **elegantrl.RENAMED}


@dataclass(frozen=True)
class Translated:
    """A config file converted to unidle's settings."""

    values: dict[str, Any]  # flat setting → value
    notes: list[str]  # a message for each setting that is ignored or changes its meaning
    base_preset: str | None  # preset for settings that the file does not give; None: the user's choice
    is_of_sb3s_ppo: bool = False  # base_preset holds the defaults of SB3's PPO


def read_config(path: Path, env: str | None = None, n_envs: int | None = None) -> Translated:
    """The settings of a config file; `env` selects an rl-zoo entry, `n_envs` from the command line takes precedence."""
    source = str(path)
    tree = read_yaml(path, rl_zoo.PlainLoader)
    entry = rl_zoo.choose_entry(tree, env, source) if rl_zoo.is_zoo(tree) else None
    if entry is not None:
        tree = tree[entry]
    style = "sb3" if entry is not None else _style(tree)
    draft = _Draft(source, style)
    values = flatten_sections(tree, source)
    if style == "unidle":
        values, renamings = with_current_names(without_other_algorithms(values))
        draft.notes += renamings
    for word, value in values.items():
        draft.take(str(word), value)
    if entry is not None and rl_zoo.ENV_ID.search(entry):  # not a group such as `atari`
        draft.values.setdefault("env", entry)
    return draft.finish(n_envs)


# --- Which kind of file it is


def _style(tree: dict[str, Any]) -> Style:
    if any(name in _SECTIONS for name in tree):
        return "unidle"
    if sb3.MARKS & tree.keys() or any(map(sb3.is_linear, tree.values())):
        return "sb3"
    return "elegantrl" if elegantrl.MARKS & tree.keys() else "unidle"


# --- Setting by setting


@dataclass
class _Draft:
    """A config file during conversion to unidle's settings."""

    source: str
    style: Style
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    per_iteration: dict[str, int] = field(default_factory=dict)  # needs n_envs, so converted last

    def take(self, word: str, value: Any) -> None:
        """Convert one setting of the file."""
        if word == "target_step" or (word == "n_minibatches" and self.style == "sb3"):
            self.per_iteration[word] = self._count(word, value)
        elif self.style == "sb3" and word in sb3.READERS:
            for name, plain in sb3.READERS[word](value, self.source, self.notes).items():
                self._set(name, word, plain)
        elif section_of(word):
            self._set(word, word, value)
        elif word in elegantrl.RENAMED or (word in _RENAMED and self.style != "unidle"):
            self._set(_RENAMED[word], word, value)
        elif self.style == "unidle":
            raise UsageError(unknown_key(word, self.source))
        else:
            sb3.leave_out(word, value, self.notes)

    def finish(self, n_envs: int | None) -> Translated:
        """The result, once every setting is converted."""
        if self.style == "sb3":
            if self.values.get("recurrent") == "lstm":
                # Defaults of sb3-contrib's RecurrentPPO that differ from PPO's.
                contrib = {"n_steps": 128, "batch_size": 128, "recurrent_size": 256}
                self.values = {**contrib, **self.values}
            if n_envs is None and "n_envs" not in self.values:
                self.notes.append("`n_envs` is not in the file; using 1, or the --preset's, unless you give --n-envs.")
        known_envs = n_envs or self.values.get("n_envs")
        if "target_step" in self.per_iteration:
            self._settle_target_step(self.per_iteration["target_step"], known_envs)
        if "n_minibatches" in self.per_iteration:
            self._settle_minibatches(self.per_iteration["n_minibatches"], known_envs)
        # Settings missing from such a file have SB3's defaults.
        of_ppo = self.style == "sb3" and "preset" not in self.values
        return Translated(self.values, self.notes, "classic" if of_ppo else self.values.get("preset"), of_ppo)

    def _set(self, name: str, word: str, value: Any) -> None:
        value = coerce(name, value, self.source)
        if self.values.setdefault(name, value) != value:
            raise UsageError(
                f"{self.source}: `{word}` sets `{name}` to {value}, but another line sets it to {self.values[name]}; "
                "keep one."
            )

    def _count(self, word: str, value: Any) -> int:
        try:
            count = int(coerce("n_steps", value, self.source))  # any integer setting would do
        except UsageError:
            count = 0
        if count < 1:
            raise UsageError(f"{self.source}: `{word}` must be a positive integer, not {value!r}.")
        return count

    def _settle_target_step(self, target_step: int, n_envs: int | None) -> None:
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

    def _settle_minibatches(self, n_minibatches: int, n_envs: int | None) -> None:
        if n_envs is None:
            self.notes.append(
                "`n_minibatches` is ignored: the batch size depends on it and on `n_envs`, "
                "which is unknown; give --n-envs."
            )
            return
        total = n_envs * self.values.get("n_steps", 2048)  # SB3's default
        # As in Isaac Lab, this overrides a batch_size in the file.
        self.values["batch_size"] = max(1, total // n_minibatches)
