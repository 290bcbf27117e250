"""Draws a mission with NumPy only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from unidle.tasks.mission.rules import CARRIER, OPEN, ROCK, ROUGH, SCOUT, Kind

if TYPE_CHECKING:
    from unidle.tasks.mission.gym_env import MissionEnv, Unit

Colour = tuple[int, int, int]

CELL = 32  # pixels
PANEL = 4 * CELL  # to the right of the map: a line for each unit

GROUND = {OPEN: (214, 205, 178), ROUGH: (176, 150, 108), ROCK: (84, 84, 92)}
GRID, BASE, INK, NIGHT = (196, 187, 160), (250, 250, 245), (36, 40, 48), (22, 27, 38)
KINDS = {"scout": (38, 110, 214), "carrier": (226, 120, 20), "relay": (130, 66, 178)}
CUT_OFF = (150, 152, 158)  # a unit that gets no orders
SURVIVOR, FULL, LOW, EMPTY = (206, 32, 48), (52, 168, 83), (222, 60, 50), (70, 76, 90)
FOG = 0.35  # how much of a cell's colour shows before it is known


def draw_mission(env: MissionEnv) -> np.ndarray:
    """[height, width, 3] uint8"""
    edge = env.level.size * CELL
    frame = np.empty((edge, edge + PANEL, 3), np.float32)
    frame[:, edge:] = NIGHT
    _draw_map(env, frame[:, :edge])
    _draw_units(env, frame[:, :edge])
    _draw_panel(env, frame[:, edge:])
    return frame.astype(np.uint8)


# -- the map -----------------------------------------------------------------------------------------------------------


def _draw_map(env: MissionEnv, frame: np.ndarray) -> None:
    for cell, ground in env.ground.items():
        tile = _tile(frame, cell)
        tile[:] = GROUND[ground]
        down, right = np.mgrid[:CELL, :CELL]
        if ground == ROUGH:
            tile[(down + right) % 8 == 0] = (150, 124, 84)
        elif ground == ROCK:
            tile[down + right < 12] = (112, 112, 120)
            tile[down + right > 2 * CELL - 14] = (62, 62, 70)
        tile[0], tile[:, 0] = GRID, GRID
    _draw_base(_tile(frame, env.base))
    for survivor in env.survivors:
        if survivor.waiting:
            _draw_survivor(_tile(frame, survivor.cell))
    for cell in env.ground.keys() - env.known:
        tile = _tile(frame, cell)
        tile[:] = FOG * tile + (1 - FOG) * np.array(NIGHT)


def _tile(frame: np.ndarray, cell: tuple[int, int]) -> np.ndarray:
    row, column = cell
    return frame[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def _draw_base(tile: np.ndarray) -> None:
    """A green cross on white."""
    tile[1:, 1:] = BASE
    down, right = (np.abs(share - 0.5) for share in _shares(tile))
    tile[(np.minimum(down, right) < 0.09) & (np.maximum(down, right) < 0.3)] = FULL
    for edge in (tile[1:4, 1:], tile[-3:, 1:], tile[1:, 1:4], tile[1:, -3:]):
        edge[:] = FULL


def _draw_survivor(tile: np.ndarray) -> None:
    down, right = _shares(tile)
    tile[np.hypot(down - 0.3, right - 0.5) < 0.15] = SURVIVOR
    tile[(down > 0.5) & (down < 0.82) & (np.abs(right - 0.5) < 0.1 + 0.3 * (down - 0.5))] = SURVIVOR


# -- units -------------------------------------------------------------------------------------------------------------


def _draw_units(env: MissionEnv, frame: np.ndarray) -> None:
    together: dict[tuple[int, int], list[tuple[Unit, bool]]] = {}
    for unit, gets_orders in zip(env.units, env.linked()):
        together.setdefault(unit.cell, []).append((unit, gets_orders))
    for cell, units in together.items():
        across = math.ceil(math.sqrt(len(units)))  # columns of units in a cell
        side = CELL // across
        for index, (unit, gets_orders) in enumerate(units):
            top, left = (place * side for place in divmod(index, across))
            tile = _tile(frame, cell)[top : top + side, left : left + side]
            _draw_unit(tile, unit, gets_orders, unit.battery / env.level.battery)


def _draw_unit(tile: np.ndarray, unit: Unit, gets_orders: bool, battery: float) -> None:
    _draw_kind(tile, unit.kind, KINDS[unit.kind.name] if gets_orders else CUT_OFF)
    if unit.carries:
        down, right = _shares(tile)
        tile[np.hypot(down - 0.43, right - 0.5) < 0.2] = BASE
        tile[np.hypot(down - 0.43, right - 0.5) < 0.14] = SURVIVOR
    height = max(2, len(tile) // 10)
    _draw_battery(tile[-height - 1 : -1, 2:-2], battery)


def _draw_kind(tile: np.ndarray, kind: Kind, colour: Colour) -> None:
    """A scout is a triangle, a carrier a box, a relay a ring; all with a dark rim."""
    down, right = _shares(tile)
    from_middle = np.abs(right - 0.5)
    if kind is SCOUT:
        depth = np.minimum(0.78 - down, (down - 0.06 - 1.75 * from_middle) / 2)
    elif kind is CARRIER:
        depth = np.minimum(0.33 - np.abs(down - 0.43), 0.36 - from_middle)
    else:
        around = np.hypot(down - 0.43, right - 0.5)
        depth = np.minimum(0.36 - around, around - 0.1)
    rim = 1.5 / len(tile)
    tile[depth > 0] = INK
    tile[depth > rim] = colour


def _draw_battery(bar: np.ndarray, share: float) -> None:
    bar[:] = EMPTY
    bar[:, : math.ceil(share * bar.shape[1])] = FULL if share > 0.25 else LOW


def _shares(tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertical and horizontal position of each pixel, in [0, 1]."""
    height, width = tile.shape[:2]
    down, right = np.mgrid[:height, :width]
    return (down + 0.5) / height, (right + 0.5) / width


# -- side panel --------------------------------------------------------------------------------------------------------


def _draw_panel(env: MissionEnv, frame: np.ndarray) -> None:
    """Draw the icon and battery of each unit and a light if it gets orders; below them, survivors and time."""
    for index, (unit, gets_orders) in enumerate(zip(env.units, env.linked())):
        line = frame[8 + index * CELL : 8 + (index + 1) * CELL]
        _draw_kind(line[:, 8 : 8 + CELL], unit.kind, KINDS[unit.kind.name])
        _draw_battery(line[10:20, 16 + CELL : PANEL - 28], unit.battery / env.level.battery)
        light = line[8:22, PANEL - 22 : PANEL - 8]
        down, right = _shares(light)
        light[np.hypot(down - 0.5, right - 0.5) < 0.5] = FULL if gets_orders else LOW
    for index, survivor in enumerate(env.survivors):
        left = 8 + index * (CELL - 4)
        sign = frame[-CELL - 18 : -18, left : left + CELL]
        _draw_survivor(sign)
        if not survivor.home:
            sign[:] = FOG * sign + (1 - FOG) * np.array(NIGHT)
    _draw_battery(frame[-14:-8, 8:-8], 1 - env.length / env.level.limit)
