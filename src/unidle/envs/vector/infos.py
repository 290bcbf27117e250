"""Packs the infos of many environments for transfer between processes.

Most environments report the same few numbers after every step. One array per key is then much faster to pickle and to
merge than a dict per environment. The merged result always equals that of `VectorEnv._add_info`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Infos = list[tuple[int, dict[str, Any]]]  # (env id, info), in the order of the calls
Columns = dict[str, tuple[type, np.ndarray]]  # key → type of each value, and the values of all environments


def to_columns(infos: Infos, n_envs: int) -> Infos | Columns:
    """One array per key, if all `n_envs` environments have one info with the same keys and types; else unchanged."""
    if len(infos) != n_envs or len({env_id for env_id, _ in infos}) != n_envs:
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
            if columns[key][1].dtype != np.dtype(kind):  # an int too large for int64
                return infos
        else:
            return infos
    return columns


def merge_infos(parts: list[Infos | Columns | None], spans: list[tuple[int, int]], add: Callable[..., Any]) -> Any:
    """Merge the infos of all workers; `add` is the vector environment's `_add_info`."""
    if all(isinstance(part, dict) for part in parts) and _same_types(parts):
        names = parts[0]
        assert isinstance(names, dict)
        infos: dict[str, Any] = {}
        for key in names:
            infos[key] = np.concatenate([part[key][1] for part in parts])  # type: ignore[call-overload,index]
            infos[f"_{key}"] = np.ones(len(infos[key]), np.bool_)
        return infos
    infos = {}
    for part, (first, _) in zip(parts, spans):
        for env_id, info in _to_infos(part, first) if isinstance(part, dict) else part or ():
            infos = add(infos, info, env_id)
    return infos


def infos_by_env(parts: list[Infos | Columns | None], spans: list[tuple[int, int]]) -> list[list[dict[str, Any]]]:
    """The infos of each environment, in the order of its calls."""
    infos: list[list[dict[str, Any]]] = [[] for _ in range(spans[-1][1])]
    for part, (first, _) in zip(parts, spans):
        for env_id, info in _to_infos(part, first) if isinstance(part, dict) else part or ():
            infos[env_id].append(info)
    return infos


def _same_types(parts: list[Any]) -> bool:
    kinds = [[(key, kind, values.dtype, values.shape[1:]) for key, (kind, values) in part.items()] for part in parts]
    return all(kind == kinds[0] for kind in kinds)


def _to_infos(columns: Columns, first: int) -> Infos:
    """The inverse of `to_columns`."""
    plain = {
        key: values.tolist() if kind in (int, float, bool) else list(values) for key, (kind, values) in columns.items()
    }
    count = len(next(iter(plain.values())))
    return [(first + index, {key: values[index] for key, values in plain.items()}) for index in range(count)]
