"""Reads the docstrings of a dataclass's fields, which Python does not keep, from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def field_docs(part: type) -> dict[str, str]:
    """Field → its docstring, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(part.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found
