"""Messages that name flags, for users of the Python API: `--batch-size auto` becomes batch_size="auto"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unidle.config.fields import section_of
from unidle.errors import TrainingError, UsageError

# A flag, and the next word if it is a value: a number, one of a few words, or module:callable.
_VALUES = ("auto", "off", "strict", "cpu", "cuda", "gaussian", "ppo", "sac", "dqn", "td3", "none")
_FLAG = re.compile(rf"(`)?--(no-)?([a-z][a-z-]*[a-z])(?: (\w+:\w+|[\d,.]*\d|(?:{'|'.join(_VALUES)})\b))?(?(1)`)")
_RENAMED = {"wrapper": "wrappers"}

Show = Callable[[str, str | None], str]  # a setting, and its value as Python code or None


def as_argument(name: str, value: str | None) -> str:
    """A setting as an argument of `unidle.train`."""
    return f"`{name}`" if value is None else f"`{name}={value}`"


def in_python_words(message: str, show: Show = as_argument) -> str:
    """`message` with flags as Python arguments; commands, such as `unidle train --resume …`, stay."""
    head, command, tail = message.partition("unidle train ")

    def replaced(found: re.Match[str]) -> str:
        _, negated, flag, word = found.groups()
        name = flag.replace("-", "_")
        name = _RENAMED.get(name, name)
        if section_of(name) is None:
            return found[0]
        return show(name, "False" if negated else _as_code(word))

    return _FLAG.sub(replaced, head) + command + tail


def _as_code(word: str | None) -> str | None:
    if word is None or word[0].isdigit():
        return word and word.replace(",", "_")
    return None if word == "none" else f'"{word}"'


@contextmanager
def python_words(show: Show = as_argument) -> Iterator[None]:
    """Errors raised in the block name arguments instead of flags."""
    try:
        yield
    except (UsageError, TrainingError) as error:
        error.args = tuple(_changed(part, show) for part in error.args)
        raise


def _changed(part: Any, show: Show) -> Any:
    return in_python_words(part, show) if isinstance(part, str) else part
