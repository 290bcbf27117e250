"""Force-directed layout of a page graph: starts as a radial tree and moves pages until none overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DOT = 12.0  # from the centre of a page to the first dot around it
_APART = 6.0  # between two halos
_ROUNDS, _WORK = 220, 12_000  # most iterations; most iterations × pages
_MAX_STRETCH = 1.9  # of one direction relative to the other


def halo(dots: int, *, middle: bool = False) -> float:
    """Return the radius of a page with `dots` around it, or the distance to the `middle` of the last dot."""
    return _DOT + 3.3 * math.sqrt(dots) + (0.0 if middle else 2.0)


def layout_pages(parents: np.ndarray, halos: np.ndarray, links: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the centre of each page [pages, 2]; `parents` [pages] come before their children, roots have -1."""
    places = _radial(parents, halos)
    count = len(places)
    if count == 1:
        return places
    rest = halos[:, None] + halos[None, :] + _APART
    pull = np.zeros((count, count))
    for a, b in links:
        pull[a, b] = pull[b, a] = 0.006
    children = np.flatnonzero(parents >= 0)
    pull[children, parents[children]] = pull[parents[children], children] = 0.12
    rounds = min(_ROUNDS, _WORK // count)
    for done in range(rounds):
        offsets = places[:, None] - places[None, :]  # [to, from, 2]
        distance = np.maximum(np.sqrt((offsets**2).sum(-1)), 1e-3)
        push = 4000.0 / distance**2 + 0.5 * np.maximum(rest - distance, 0.0)
        push -= pull * np.maximum(distance - rest, 0.0)
        np.fill_diagonal(push, 0.0)
        moves = (offsets / distance[..., None] * push[..., None]).sum(1) - 0.01 * places
        length = np.sqrt((moves**2).sum(-1, keepdims=True))
        limit = 40.0 * (1.0 - done / rounds) + 0.5
        places = places + moves * np.minimum(1.0, limit / np.maximum(length, 1e-9))
    return places


def fit_to_box(
    places: np.ndarray, halos: np.ndarray, box: tuple[float, float, float, float]
) -> tuple[np.ndarray, float]:
    """Fit the layout into a box (left, top, right, bottom), longer axis horizontal; also returns the scale."""
    centred = places - places.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    turned = centred @ axes[:, ::-1]
    low, high = (turned - halos[:, None]).min(0), (turned + halos[:, None]).max(0)
    room = np.array([box[2] - box[0], box[3] - box[1]])
    each = room / (high - low)
    scale = float(min(each.min(), 1.25))
    stretch = np.minimum(each, _MAX_STRETCH * scale)
    middle = np.array([box[0] + box[2], box[1] + box[3]]) / 2
    return middle + (turned - (low + high) / 2) * stretch, scale


def _radial(parents: np.ndarray, halos: np.ndarray) -> np.ndarray:
    """Place each page on a ring by its depth, in its parent's sector, with an angle proportional to its subtree."""
    count = len(parents)
    weight = halos.copy()
    for page in range(count - 1, 0, -1):
        if parents[page] >= 0:
            weight[parents[page]] += weight[page]
    begin, width, depth = np.zeros(count), np.full(count, 2 * math.pi), np.zeros(count)
    taken = np.zeros(count)  # of each sector, by earlier children
    for page in range(1, count):
        parent = parents[page]
        if parent < 0:
            continue
        share = weight[page] / max(weight[parent] - halos[parent], 1e-9)
        begin[page], width[page] = begin[parent] + taken[parent], width[parent] * share
        taken[parent] += width[page]
        depth[page] = depth[parent] + 1
    angle = begin + width / 2
    return np.stack([np.cos(angle), np.sin(angle)], 1) * (70.0 * depth)[:, None]
