"""Errors of `unidle.sb3`, which are ValueErrors too, as most of Stable-Baselines3's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unidle.config.python_words import as_argument, python_words
from unidle.errors import UsageError


class ArgumentError(UsageError, ValueError):
    """A mistake in an argument of a model: one sentence that says what is wrong and what to do."""


class WeightsError(ArgumentError, RuntimeError):
    """Weights that do not fit a network; torch raises a RuntimeError for them."""


@contextmanager
def argument_errors() -> Iterator[None]:
    """Mistakes found in the block are ArgumentErrors, which name arguments of the model, not flags."""
    try:
        with python_words(_show):
            yield
    except UsageError as error:
        if isinstance(error, ValueError | AttributeError | ImportError):
            raise
        raise ArgumentError(*error.args).with_traceback(error.__traceback__) from error.__cause__


def _show(name: str, value: str | None) -> str:
    """A setting in a message: the argument of the constructor, or `settings` if it has none of that name."""
    if name == "algo" and value is not None:
        return value.strip('"').upper()
    if name in ("batch_size", "n_steps", "n_epochs", "buffer_size", "learning_rate", "normalize_advantage", "device"):
        return as_argument(name, value)
    if name == "n_envs":
        return "`n_envs` of make_vec_env"
    return f'`settings={{"{name}": {value or "…"}}}`'
