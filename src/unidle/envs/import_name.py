"""Objects by the name under which another process can import them: `module:callable`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from unidle.errors import UsageError


def import_module(name: str) -> Any:
    """Import a user's module, also from the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise  # the module exists; something that it imports is missing
        raise UsageError(f"Module `{name}` cannot be found; run from its folder, or check the name.") from None


def callable_name(function: Callable[..., Any]) -> str:
    """`module:name` if a new process can import the same object by it, else `<name>`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    return f"<{name.strip('<>')}>"


def is_reproducible(name: str) -> bool:
    """Whether the object can be created again from its name in config.yaml."""
    return not name.startswith("<")
