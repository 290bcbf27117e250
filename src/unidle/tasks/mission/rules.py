"""The rules of unidle/Mission-v0 and all its constants; `device_env` implements them on tensors, `gym_env` for one.

Units set out from a base in the middle of a square map to find survivors and bring them home.

Map. Each cell is open ground, rough ground or rock, drawn for each episode. Base's own row and column are roads,
on which there is no rock. Survivors lie more than `NEAR` steps from base, each on a cell to which one can walk straight
from a road: so each can be reached, by a walk no longer than its distance. All distances are rows plus columns.

Fog. A cell is known once it was within a unit's sight, and a survivor is found once its cell is known. At a level
without fog everything is known from the start.

Orders. Each unit is told to stay, to move by one cell, or to act.
    move   Takes battery: the unit's weight, twice that onto rough ground. Not onto rock or off the map, and not where
           the battery left is too little. Any number of units may stand on one cell.
    act    On a survivor, a carrier that carries nobody picks it up; if several do, the first of them has it.
           At base, a carrier puts its survivor down, which is then home; any other unit fills its battery.
What cannot be done is masked; ordered all the same, the unit stays.

Comms. A unit gets orders within range of base, or of a relay that gets them itself; elsewhere it can only stay.

Reward. For each cell seen for the first time, each survivor found, picked up and brought home, less a cost per step.

End. Terminated when all survivors are home, truncated at the level's limit. By its numbers each level can be solved: a
battery lasts to the farthest cell and back on rough ground, and comms reach there if relays stand on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError

OPEN, ROUGH, ROCK = 0, 1, 2  # what a cell is; to enter it takes 1 + that times the unit's weight
ROCK_BELOW, ROUGH_FROM = 0.1875, 0.75  # the cell's random number; exact in float32, so that both versions agree
NEAR = 2

STAY, NORTH, SOUTH, WEST, EAST, ACT = range(6)
ORDERS = 6
MOVES = {NORTH: (-1, 0), SOUTH: (1, 0), WEST: (0, -1), EAST: (0, 1)}  # rows, columns

SEEN, FOUND, PICKED_UP, BROUGHT_HOME, PER_STEP = 0.01, 0.5, 1.0, 5.0, -0.02  # rewards


@dataclass(frozen=True)
class Kind:
    """What sets units apart."""

    name: str
    sight: int  # cells
    weight: int  # battery that a step on open ground takes


SCOUT, CARRIER, RELAY = Kind("scout", 4, 2), Kind("carrier", 1, 1), Kind("relay", 1, 1)


@dataclass(frozen=True)
class Level:
    """One row of the curriculum."""

    size: int  # cells along an edge; even
    scouts: int
    carriers: int
    relays: int
    survivors: int
    battery: int  # of each unit
    fog: bool
    comms: int  # range in cells
    limit: int  # steps of an episode

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each unit, in the order of the action's heads."""
        return (SCOUT,) * self.scouts + (CARRIER,) * self.carriers + (RELAY,) * self.relays

    @property
    def cells(self) -> int:
        """Cells of the map, numbered row by row."""
        return self.size**2

    @property
    def draws(self) -> int:
        """Random numbers of an episode: one per cell for the ground, then one per cell for the survivors.

        These lie on the cells with the highest numbers of those on which they may; of equal ones the later cell.
        """
        return 2 * self.cells

    @property
    def observation_space(self) -> spaces.Box:
        """What is known, one vector.

        Of each cell, map by map: unknown; rough; rock; a survivor found and waiting.
        Of each unit: battery; gets no orders; carries; a survivor is found and waiting; rock or edge to the north,
        south, west, east; then where base is, and where the nearest such survivor (of equally near ones the first):
        rows, columns, and whether that is north, south, west, east.
        Of the mission: survivors found; home; time left.
        Distances are in map sizes, all else in shares.
        """
        width = 4 * self.cells + 20 * len(self.kinds) + 3
        return spaces.Box(-1.0, 1.0, (width,), np.float32)

    @property
    def action_space(self) -> spaces.MultiDiscrete:
        """One order per unit."""
        return spaces.MultiDiscrete([ORDERS] * len(self.kinds))


LEVELS = {
    1: Level(8, scouts=0, carriers=2, relays=0, survivors=2, battery=100, fog=False, comms=16, limit=50),
    2: Level(10, scouts=1, carriers=2, relays=0, survivors=2, battery=44, fog=True, comms=20, limit=80),
    3: Level(12, scouts=1, carriers=2, relays=1, survivors=3, battery=54, fog=True, comms=6, limit=120),
    4: Level(16, scouts=2, carriers=2, relays=2, survivors=4, battery=70, fog=True, comms=6, limit=200),
}


def level_at(number: int) -> Level:
    """The row of the curriculum; UsageError if there is none."""
    if number not in LEVELS:
        raise UsageError(f"unidle/Mission-v0 has the levels 1 to {max(LEVELS)}, and `level` is {number!r}; choose one.")
    return LEVELS[number]
