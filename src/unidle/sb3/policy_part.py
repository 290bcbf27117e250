"""Attributes of a model that are parts of its policy, such as `model.actor`."""

from __future__ import annotations

from typing import Any


class PolicyPart:
    """A network of `model.policy`, which has the same name there."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(model.policy, self._name)
