"""Search and rescue one mission at a time, in plain Python: the rules are in `rules`.

Written for clarity and for rendering; the tests compare `device_env` with it step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from unidle.tasks.mission.render import draw_mission
from unidle.tasks.mission.rules import (
    ACT,
    BROUGHT_HOME,
    CARRIER,
    FOUND,
    MOVES,
    NEAR,
    OPEN,
    ORDERS,
    PER_STEP,
    PICKED_UP,
    RELAY,
    ROCK,
    ROCK_BELOW,
    ROUGH,
    ROUGH_FROM,
    SEEN,
    STAY,
    Kind,
    level_at,
)

Cell = tuple[int, int]  # row, column


@dataclass
class Survivor:
    """A survivor to be rescued."""

    cell: Cell
    carried: bool = False
    home: bool = False

    @property
    def waiting(self) -> bool:
        """Whether it still waits at `cell`."""
        return not (self.carried or self.home)


@dataclass
class Unit:
    """A unit that gets orders."""

    kind: Kind
    cell: Cell
    battery: int
    carries: Survivor | None = None


class MissionEnv(gymnasium.Env):
    """One mission.

    `reset(seed=s)` starts episode 0 of environment 0 of `Mission(.., seed=s)`, and each later `reset()` its next
    episode; `options={"env": i, "episode": e}` selects others.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(self, level: int = 1, render_mode: str | None = None) -> None:
        self.level = level_at(level)
        self.observation_space, self.action_space = self.level.observation_space, self.level.action_space
        self.render_mode = render_mode
        self.base: Cell = (self.level.size // 2, self.level.size // 2)
        self._seed: int | None = None
        self._env, self._episode = 0, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None or self._seed is None:
            self._seed = int(self.np_random.integers(2**32)) if seed is None else seed
            self._env, self._episode = 0, -1
        chosen = options or {}
        self._env = chosen.get("env", self._env)
        self._episode = chosen.get("episode", self._episode + 1)
        numbers = random_numbers(self._seed, self._env, self._episode, self.level.draws)
        self.ground = self._make_ground(numbers[: self.level.cells])
        self.survivors = self._hide_survivors(numbers[self.level.cells :])
        self.units = [Unit(kind, self.base, self.level.battery) for kind in self.level.kinds]
        self.known = {cell for cell in self.ground if not self.level.fog or self._in_sight(cell)}
        self.length = 0
        return self._observation(), self._info()

    def _make_ground(self, numbers: Sequence[float]) -> dict[Cell, int]:
        ground = {}
        for index, number in enumerate(numbers):
            row, column = divmod(index, self.level.size)
            on_road = row == self.base[0] or column == self.base[1]
            if number < ROCK_BELOW and not on_road:
                ground[row, column] = ROCK
            else:
                ground[row, column] = ROUGH if number >= ROUGH_FROM else OPEN
        return ground

    def _hide_survivors(self, numbers: Sequence[float]) -> list[Survivor]:
        ranked = sorted(zip(numbers, self.ground), reverse=True)
        places = [cell for _, cell in ranked if distance(cell, self.base) > NEAR and self._straight_from_a_road(cell)]
        return [Survivor(cell) for cell in places[: self.level.survivors]]

    def _straight_from_a_road(self, cell: Cell) -> bool:
        return any(
            all(self.ground[passed] != ROCK for passed in straight_path(cell, road))
            for road in ((self.base[0], cell[1]), (cell[0], self.base[1]))
        )

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, action: Sequence[int] | np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Step with one order per unit."""
        known, found = len(self.known), self._found()
        allowed = self._allowed()
        reward = PER_STEP
        for unit, order, possible in zip(self.units, action, allowed):
            order = int(order)
            if order not in possible:
                continue
            if order in MOVES:
                unit.cell = neighbour(unit.cell, order)
                unit.battery -= self._cost(unit, unit.cell)
            elif order == ACT:
                reward += self._act(unit)
        self.known |= {cell for cell in self.ground.keys() - self.known if self._in_sight(cell)}
        self.length += 1
        reward += SEEN * (len(self.known) - known) + FOUND * (self._found() - found)
        terminated = all(survivor.home for survivor in self.survivors)
        truncated = self.length >= self.level.limit and not terminated
        return self._observation(), reward, terminated, truncated, self._info()

    def _act(self, unit: Unit) -> float:
        """Perform the unit's action and return its reward."""
        if unit.carries:
            unit.carries.home, unit.carries.carried = True, False
            unit.carries = None
            return BROUGHT_HOME
        if unit.cell == self.base:
            unit.battery = self.level.battery
            return 0.0
        survivor = self._waiting_at(unit.cell)
        if survivor is None:  # another carrier was first
            return 0.0
        unit.carries, survivor.carried = survivor, True
        return PICKED_UP

    def _allowed(self) -> list[set[int]]:
        """Return the orders that each unit may get."""
        linked = self.linked()
        return [self._possible(unit) if gets_orders else {STAY} for unit, gets_orders in zip(self.units, linked)]

    def _possible(self, unit: Unit) -> set[int]:
        possible = {STAY}
        for order in MOVES:
            there = neighbour(unit.cell, order)
            if self._passable(there) and self._cost(unit, there) <= unit.battery:
                possible.add(order)
        if unit.cell == self.base:
            if unit.carries or unit.battery < self.level.battery:
                possible.add(ACT)
        elif unit.kind is CARRIER and unit.carries is None and self._waiting_at(unit.cell):
            possible.add(ACT)
        return possible

    def linked(self) -> list[bool]:
        """Return which units get orders."""
        senders, reached = [self.base], [False] * len(self.units)
        while senders:
            sender = senders.pop()
            for index, unit in enumerate(self.units):
                if not reached[index] and distance(unit.cell, sender) <= self.level.comms:
                    reached[index] = True
                    if unit.kind is RELAY:
                        senders.append(unit.cell)
        return reached

    def _passable(self, cell: Cell) -> bool:
        return self.ground.get(cell, ROCK) != ROCK

    def _cost(self, unit: Unit, cell: Cell) -> int:
        return unit.kind.weight * (2 if self.ground[cell] == ROUGH else 1)

    def _in_sight(self, cell: Cell) -> bool:
        return any(distance(unit.cell, cell) <= unit.kind.sight for unit in self.units)

    def _waiting_at(self, cell: Cell) -> Survivor | None:
        return next((survivor for survivor in self.survivors if survivor.waiting and survivor.cell == cell), None)

    def _found(self) -> int:
        return sum(survivor.cell in self.known for survivor in self.survivors)

    # -- observations --------------------------------------------------------------------------------------------------

    def _observation(self) -> np.ndarray:
        level, size = self.level, self.level.size
        calls = [survivor.cell for survivor in self.survivors if survivor.waiting and survivor.cell in self.known]
        values: list[float] = [cell not in self.known for cell in self.ground]
        values += [cell in self.known and ground == ROUGH for cell, ground in self.ground.items()]
        values += [cell in self.known and ground == ROCK for cell, ground in self.ground.items()]
        values += [cell in calls for cell in self.ground]
        for unit, gets_orders in zip(self.units, self.linked()):
            values += [unit.battery / level.battery, not gets_orders, unit.carries is not None, bool(calls)]
            values += [not self._passable(neighbour(unit.cell, order)) for order in MOVES]
            call = min(calls, key=lambda cell: distance(cell, unit.cell), default=unit.cell)
            for row, column in (self.base, call):
                down, right = row - unit.cell[0], column - unit.cell[1]
                values += [down / size, right / size, down < 0, down > 0, right < 0, right > 0]
        home = sum(survivor.home for survivor in self.survivors)
        values += [self._found() / level.survivors, home / level.survivors, 1 - self.length / level.limit]
        return np.array(values, np.float32)

    def _info(self) -> dict[str, Any]:
        mask = [order in possible for possible in self._allowed() for order in range(ORDERS)]
        return {"action_mask": np.array(mask, np.uint8)}

    def render(self) -> np.ndarray | None:
        """[height, width, 3] uint8: the map, with unknown cells dimmed, and the state of each unit."""
        return draw_mission(self) if self.render_mode == "rgb_array" else None


def distance(one: Cell, other: Cell) -> int:
    """Return the Manhattan distance."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def neighbour(cell: Cell, order: int) -> Cell:
    """Return the adjacent cell in a direction."""
    down, right = MOVES[order]
    return cell[0] + down, cell[1] + right


def straight_path(one: Cell, other: Cell) -> list[Cell]:
    """Return all cells between two cells of one row or column, inclusive."""
    (top, bottom), (left, right) = sorted((one[0], other[0])), sorted((one[1], other[1]))
    return [(row, column) for row in range(top, bottom + 1) for column in range(left, right + 1)]


def random_numbers(seed: int, env: int, episode: int, draws: int) -> list[float]:
    """Return the numbers in [0, 1) that `unidle.envs.device.device_env.uniform` draws for this episode."""
    word = _hash_32(env + (((seed ^ (seed >> 32)) * 0x9E3779B97F4A7C15) >> 16))
    word = _hash_32(word ^ _hash_32(episode + 0x1E3779B9))
    return [(_hash_32(word + draw * 0x05EBCA6B) >> 8) / 2**24 for draw in range(1, draws + 1)]


def _hash_32(word: int) -> int:
    """The hash of `device_env`; Python integers do not wrap, so each operation is masked to 32 bits."""
    word &= 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return word ^ (word >> 15)
