"""Where the pages of a drawing lie: a tree around its first page, pulled and pushed until nothing lies on another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DOT = 12.0  # from the middle of a page to the first of the dots around it
_APART = 6.0  # between two pages with all that is around them
_ROUNDS, _WORK = 220, 12_000  # of pulling and pushing; and of them times pages, at most
_MOST_STRETCH = 1.9  # of one direction more than of the other


def halo(dots: int, *, middle: bool = False) -> float:
    """How far it reaches from a page with so many dots around it; or from it to the middle of the last of them."""
    return _DOT + 3.3 * math.sqrt(dots) + (0.0 if middle else 2.0)


def spread(parents: np.ndarray, halos: np.ndarray, links: Sequence[tuple[int, int]]) -> np.ndarray:
    """[pages, 2] the middle of each; `parents` [pages] come before their children, the first has none."""
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
        apart = places[:, None] - places[None, :]  # [to, from, 2]
        distance = np.maximum(np.sqrt((apart**2).sum(-1)), 1e-3)
        push = 4000.0 / distance**2 + 0.5 * np.maximum(rest - distance, 0.0)
        push -= pull * np.maximum(distance - rest, 0.0)
        np.fill_diagonal(push, 0.0)
        moves = (apart / distance[..., None] * push[..., None]).sum(1) - 0.01 * places
        length = np.sqrt((moves**2).sum(-1, keepdims=True))
        limit = 40.0 * (1.0 - done / rounds) + 0.5
        places = places + moves * np.minimum(1.0, limit / np.maximum(length, 1e-9))
    return places


def placed(places: np.ndarray, halos: np.ndarray, box: tuple[float, float, float, float]) -> tuple[np.ndarray, float]:
    """The same within a box (left, top, right, bottom), the longer way lying down; and the scale of what is drawn."""
    centred = places - places.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    turned = centred @ axes[:, ::-1]
    low, high = (turned - halos[:, None]).min(0), (turned + halos[:, None]).max(0)
    room = np.array([box[2] - box[0], box[3] - box[1]])
    each = room / (high - low)
    scale = float(min(each.min(), 1.25))
    stretch = np.minimum(each, _MOST_STRETCH * scale)
    middle = np.array([box[0] + box[2], box[1] + box[3]]) / 2
    return middle + (turned - (low + high) / 2) * stretch, scale


def _radial(parents: np.ndarray, halos: np.ndarray) -> np.ndarray:
    """Each page on a ring by its depth, in the part of it that its parent has, shared out by what comes after each."""
    count = len(parents)
    weight = halos.copy()
    for page in range(count - 1, 0, -1):
        if parents[page] >= 0:
            weight[parents[page]] += weight[page]
    begin, width, depth = np.zeros(count), np.full(count, 2 * math.pi), np.zeros(count)
    taken = np.zeros(count)  # of the part of each, by the children before
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
