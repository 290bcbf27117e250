"""The infos of many environments on their way between processes.

Most environments say the same few numbers after every step. One array per key is then a fraction of the work that a
dict per environment is, to pickle and to put together. The result is always what `VectorEnv._add_info` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Infos = list[tuple[int, dict[str, Any]]]  # (environment, what it said), in the order it was said
Columns = dict[
    str, tuple[type, np.ndarray]
]  # key → type of each value, and the values of one environment after another


def in_columns(infos: Infos, n_envs: int) -> Infos | Columns:
    """One array per key, if each of `n_envs` environments spoke once, with the same keys and types; else as it is."""
    if len(infos) != n_envs or len({line for line, _ in infos}) != n_envs:
        return infos
    first = infos[0][1]
    keys = list(first)
    if any(list(info) != keys for _, info in infos):
        return infos
    columns: Columns = {}
    for key in keys:
        values = [info[key] for _, info in infos]
        kind = type(values[0])
        if any(type(value) is not kind for value in values):
            return infos
        if kind is np.ndarray:
            if values[0].dtype.hasobject or len({(value.shape, value.dtype) for value in values}) > 1:
                return infos
            columns[key] = kind, np.stack(values)
        elif kind in (float, int, bool) or issubclass(kind, np.number):
            columns[key] = kind, np.array(values)
            if columns[key][1].dtype != np.dtype(kind):  # a whole number too large for the dtype of whole numbers
                return infos
        else:
            return infos
    return columns


def put_together(told: list[Infos | Columns | None], spans: list[tuple[int, int]], add: Callable[..., Any]) -> Any:
    """What all workers told, each of the environments in its span; `add` is the vector environment's `_add_info`."""
    if all(isinstance(part, dict) for part in told) and _alike(told):
        names = told[0]
        assert isinstance(names, dict)
        infos: dict[str, Any] = {}
        for key in names:
            infos[key] = np.concatenate([part[key][1] for part in told])  # type: ignore[call-overload,index]
            infos[f"_{key}"] = np.ones(len(infos[key]), np.bool_)
        return infos
    infos = {}
    for part, (first, _) in zip(told, spans):
        for line, info in _one_by_one(part, first) if isinstance(part, dict) else part or ():
            infos = add(infos, info, line)
    return infos


def _alike(parts: list[Any]) -> bool:
    kinds = [[(key, kind, values.dtype, values.shape[1:]) for key, (kind, values) in part.items()] for part in parts]
    return all(kind == kinds[0] for kind in kinds)


def _one_by_one(columns: Columns, first: int) -> Infos:
    """The infos that `in_columns` was given."""
    plain = {
        key: values.tolist() if kind in (int, float, bool) else list(values) for key, (kind, values) in columns.items()
    }
    count = len(next(iter(plain.values())))
    return [(first + index, {key: values[index] for key, values in plain.items()}) for index in range(count)]
