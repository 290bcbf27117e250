"""Constructor arguments as attributes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidle.errors import UsageError


class FixedArgument:
    """An argument that can be read but not assigned: each run reads the model's recipe, not its attributes."""

    def __init__(self, value: str | Callable[[Any], Any] | None = None) -> None:
        """`value` is the recipe's name for it if that differs, or a function of the recipe."""
        self._value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        recipe = model.config.recipe
        return self._value(recipe) if callable(self._value) else getattr(recipe, self._value or self._name)

    def __set__(self, model: Any, value: Any) -> None:
        name = self._name
        raise UsageError(f"`{name}` cannot be assigned; save the model, and load it with load(path, {name}=…).")
