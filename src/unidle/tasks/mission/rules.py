"""The rules of unidle/Mission-v0 and all its constants; `device_env` implements them on tensors, `gym_env` for one.

Units start from a base in the middle of a square map, find survivors and bring them home.

Map. Each cell is open ground, rough ground or rock, drawn for each episode. The row and column of the base are roads,
without rock. Survivors are more than `NEAR` steps from the base, each on a cell that a straight line connects to a
road, so each can be reached by a path no longer than its distance. All distances are Manhattan distances.

Fog. A cell becomes known when it is within a unit's sight, and a survivor is found when its cell becomes known. At a
level without fog everything is known from the start.

Orders. Each unit is ordered to stay, to move by one cell, or to act.
    move   Uses battery: the unit's weight, or twice that onto rough ground. Not allowed onto rock, off the map, or
           without enough battery. Any number of units may share a cell.
    act    On a survivor, an empty carrier picks it up; if several try, the first one gets it.
           At the base, a carrier puts its survivor down, who is then home; any other unit recharges its battery.
Invalid orders are masked; a unit that gets one anyway stays.

Comms. A unit gets orders within range of the base, or of a relay that gets orders; elsewhere it can only stay.

Reward. For each cell seen for the first time, each survivor found, picked up and brought home, minus a cost per step.

End. Terminated when all survivors are home, truncated at the level's limit. Every level can be solved: a battery lasts
to the farthest cell and back on rough ground, and comms reach it if relays stand on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from unidle.errors import UsageError

OPEN, ROUGH, ROCK = 0, 1, 2  # kinds of ground; entering costs (1 + kind) × the unit's weight
ROCK_BELOW, ROUGH_FROM = 0.1875, 0.75  # thresholds of a cell's random number; exact in float32, so both versions agree
NEAR = 2

STAY, NORTH, SOUTH, WEST, EAST, ACT = range(6)
ORDERS = 6
MOVES = {NORTH: (-1, 0), SOUTH: (1, 0), WEST: (0, -1), EAST: (0, 1)}  # rows, columns

SEEN, FOUND, PICKED_UP, BROUGHT_HOME, PER_STEP = 0.01, 0.5, 1.0, 5.0, -0.02  # rewards


@dataclass(frozen=True)
class Kind:
    """The properties of a kind of unit."""

    name: str
    sight: int  # cells
    weight: int  # battery used by a step on open ground


SCOUT, CARRIER, RELAY = Kind("scout", 4, 2), Kind("carrier", 1, 1), Kind("relay", 1, 1)


@dataclass(frozen=True)
class Level:
    """One level of the curriculum."""

    size: int  # cells along an edge; even
    scouts: int
    carriers: int
    relays: int
    survivors: int
    battery: int  # of each unit
    fog: bool
    comms: int  # range in cells
    limit: int  # steps per episode

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

        Survivors are on the allowed cells with the highest numbers; ties go to the later cell.
        """
        return 2 * self.cells

    @property
    def observation_space(self) -> spaces.Box:
        """Everything that is known, as one vector.

        One map each: unknown; rough; rock; a survivor found and waiting.
        Per unit: battery; gets no orders; carries a survivor; any survivor found and waiting; rock or edge to the
        north, south, west, east; then the positions of the base and of the nearest such survivor (ties: the first),
        each as rows, columns, and whether it is to the north, south, west, east.
        Per mission: survivors found; survivors home; time left.
        Distances are relative to the map size, all other values are fractions.
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
    """Return a level of the curriculum; UsageError if there is none."""
    if number not in LEVELS:
        raise UsageError(
            f"`level` is {number!r}, but unidle/Mission-v0 has levels 1 to {max(LEVELS)}; choose one of them."
        )
    return LEVELS[number]
