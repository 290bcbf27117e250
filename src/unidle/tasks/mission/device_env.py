"""Search and rescue on tensors, batched: the rules are in `rules`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unidle.envs.device.device_env import State, Step, uniform
from unidle.tasks.mission.rules import (
    ACT,
    BROUGHT_HOME,
    CARRIER,
    FOUND,
    MOVES,
    NEAR,
    NORTH,
    ORDERS,
    PER_STEP,
    PICKED_UP,
    RELAY,
    ROCK,
    ROCK_BELOW,
    ROUGH,
    ROUGH_FROM,
    SEEN,
    level_at,
)

# The state, besides `episode` and `length`, of N environments with C cells, U units and V survivors:
#   ground [N, C] uint8, known [N, C] bool, place [N, V] the cell where each survivor waits or waited,
#   cell [N, U] where each unit is, battery [N, U], holds [N, U, V] bool which unit carries which survivor,
#   home [N, V] bool


class Mission:
    """N missions of one level."""

    def __init__(
        self, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0, *, level: int = 1
    ) -> None:
        self._level = rules = level_at(level)
        self._seed, self.n_envs = seed, n_envs
        self.observation_space, self.action_space = rules.observation_space, rules.action_space
        self.episode_limit = rules.limit
        self._env = torch.arange(first_index, first_index + n_envs, device=device)

        def constant(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, device=device)

        maps = _Geography(rules.size)
        self._base = maps.base
        self._road, self._is_far = constant(maps.road), constant(maps.distance[maps.base] > NEAR)
        self._legs = [constant(leg) for leg in maps.legs]
        self._distance, self._next_cell = constant(maps.distance), constant(maps.next_cell)
        self._rows_columns = constant(maps.rows_columns)
        sight = np.array([kind.sight for kind in rules.kinds])
        self._views = constant(maps.distance <= sight[:, None, None])  # [U, C, C] from a cell, of a cell
        self._unit = torch.arange(len(rules.kinds), device=device)
        self._weight = constant(np.array([kind.weight for kind in rules.kinds]))
        self._is_carrier = constant(np.array([kind is CARRIER for kind in rules.kinds]))
        self._is_relay = constant(np.array([kind is RELAY for kind in rules.kinds]))
        self._survivor = torch.arange(rules.survivors, device=device)
        self._cell = torch.arange(rules.cells, device=device)

    # -- start of an episode -------------------------------------------------------------------------------------------

    def begin(self) -> tuple[State, Tensor]:
        """Return the state and observation at the start of episode 0 of every environment."""
        state = self._initial_state(torch.zeros_like(self._env))
        return state, self._observe(state)

    def _initial_state(self, episode: Tensor) -> State:
        rules, n_envs, units = self._level, self.n_envs, len(self._unit)
        for_ground, for_survivors = uniform(self._seed, self._env, episode, rules.draws).chunk(2, -1)
        rock = (for_ground < ROCK_BELOW) & ~self._road
        rough = for_ground >= ROUGH_FROM
        cell = torch.full((n_envs, units), self._base, device=episode.device)
        known = torch.ones_like(rock)
        if rules.fog:
            known = self._seen_from(cell)
        return {
            "ground": (rock * ROCK + rough * ROUGH).to(torch.uint8),
            "known": known,
            "place": self._places(rock, for_survivors),
            "cell": cell,
            "battery": torch.full_like(cell, rules.battery),
            "holds": torch.zeros(n_envs, units, rules.survivors, dtype=torch.bool, device=episode.device),
            "home": torch.zeros(n_envs, rules.survivors, dtype=torch.bool, device=episode.device),
            "episode": episode,
            "length": torch.zeros_like(episode),
        }

    def _places(self, rock: Tensor, numbers: Tensor) -> Tensor:
        """[N, V] the cells of the survivors."""
        obstacles = [rock.float() @ leg for leg in self._legs]
        is_allowed = ((obstacles[0] == 0) | (obstacles[1] == 0)) & self._is_far
        # Distinct integers: the order of ties would depend on the device.
        rank = (numbers * 2.0**24).long() * self._level.cells + self._cell
        return torch.where(is_allowed, rank, -1).topk(self._level.survivors, -1).indices

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, U]."""
        state, reward = self._advance(state, action.long())
        terminated = state["home"].all(-1)
        truncated = (state["length"] >= self._level.limit) & ~terminated
        ended = terminated | truncated
        final = self._observe(state)
        initial = self._initial_state(state["episode"] + ended)
        state = {name: torch.where(_broadcast(ended, value), initial[name], value) for name, value in state.items()}
        return state, Step(self._observe(state), final, reward, terminated, truncated)

    def _advance(self, state: State, order: Tensor) -> tuple[State, Tensor]:
        allowed = self.mask(state).view(*order.shape, ORDERS)
        order = order * allowed.gather(-1, order.unsqueeze(-1)).squeeze(-1)  # STAY is 0
        cell = self._next_cell[state["cell"], order]
        moves = cell != state["cell"]
        battery = state["battery"] - moves * self._weight * (1 + state["ground"].gather(1, cell).long())

        # Masked orders were removed above, so every unit that acts has something to do.
        acts, holds = order == ACT, state["holds"]
        at_base, carrying = cell == self._base, holds.any(-1)
        battery = torch.where(acts & at_base & ~carrying, self._level.battery, battery)
        puts_down = holds & acts.unsqueeze(-1)
        reaches = self._within_reach(state) & (acts & self._is_carrier & ~carrying).unsqueeze(-1)
        picks_up = reaches & (reaches.cumsum(1) == 1)
        brought = puts_down.any(1)

        known = state["known"] | self._seen_from(cell)
        found = known.gather(1, state["place"]) & ~state["known"].gather(1, state["place"])
        reward = (
            SEEN * (known & ~state["known"]).sum(-1)
            + FOUND * found.sum(-1)
            + PICKED_UP * picks_up.sum((1, 2))
            + BROUGHT_HOME * brought.sum(-1)
            + PER_STEP
        )
        moved = {
            "ground": state["ground"],
            "known": known,
            "place": state["place"],
            "cell": cell,
            "battery": battery,
            "holds": (holds & ~puts_down) | picks_up,
            "home": state["home"] | brought,
            "episode": state["episode"],
            "length": state["length"] + 1,
        }
        return moved, reward.float()

    def mask(self, state: State) -> Tensor:
        """[N, U · orders] uint8: 1 for each order that a unit may get."""
        cell, battery, carrying = state["cell"], state["battery"], state["holds"].any(-1)
        there, free = self._around(state)
        affordable = self._weight.unsqueeze(-1) * (1 + there) <= battery.unsqueeze(-1)
        acts = (cell == self._base) & (carrying | (battery < self._level.battery))
        acts = acts | (self._within_reach(state).any(-1) & self._is_carrier & ~carrying)
        valid = torch.cat((free & affordable, acts.unsqueeze(-1)), -1) & self._linked(cell).unsqueeze(-1)
        return torch.cat((torch.ones_like(valid[..., :1]), valid), -1).flatten(1).to(torch.uint8)

    def _around(self, state: State) -> tuple[Tensor, Tensor]:
        """[N, U, 4] the ground north, south, west and east of each unit, and whether it is neither rock nor edge."""
        around = self._next_cell[state["cell"]][..., NORTH:ACT]
        there = state["ground"].gather(1, around.flatten(1)).view(around.shape).long()
        return there, (around != state["cell"].unsqueeze(-1)) & (there != ROCK)

    def _within_reach(self, state: State) -> Tensor:
        """[N, U, V] whether a survivor waits at the unit's cell."""
        here = state["cell"].unsqueeze(-1) == state["place"].unsqueeze(1)
        return here & _waiting(state).unsqueeze(1)

    def _linked(self, cell: Tensor) -> Tensor:
        """[N, U] whether a unit gets orders."""
        linked = self._distance[self._base][cell] <= self._level.comms
        in_range = self._distance[cell.unsqueeze(2), cell.unsqueeze(1)] <= self._level.comms  # [N, U, by U]
        for _ in range(self._level.relays):  # the longest possible chain
            linked = linked | (in_range & (linked & self._is_relay).unsqueeze(1)).any(-1)
        return linked

    def _seen_from(self, cell: Tensor) -> Tensor:
        """[N, C] the cells that units on these cells [N, U] see together."""
        return self._views[self._unit, cell].any(1)

    # -- observations --------------------------------------------------------------------------------------------------

    def _observe(self, state: State) -> Tensor:
        known, cell, place, size = state["known"], state["cell"], state["place"], self._level.size
        found = known.gather(1, place)
        waiting = found & _waiting(state)
        survivors = torch.zeros_like(known).scatter(1, place, waiting)
        maps = torch.cat((~known, known & (state["ground"] == ROUGH), known & (state["ground"] == ROCK), survivors), -1)

        where = self._rows_columns[cell]  # [N, U, 2]
        count = len(self._survivor)
        rank = self._distance[cell.unsqueeze(2), place.unsqueeze(1)] * count + self._survivor  # [N, U, V] all different
        rank = torch.where(waiting.unsqueeze(1), rank, 4 * size * count)
        nearest = self._rows_columns[place.gather(1, rank.amin(-1) % count)]
        any_waiting = waiting.any(-1, keepdim=True).expand(cell.shape).unsqueeze(-1)
        to_base, to_survivor = self._rows_columns[self._base] - where, (nearest - where) * any_waiting
        _, free = self._around(state)
        units = torch.cat(
            (
                (state["battery"] / self._level.battery).unsqueeze(-1),
                ~self._linked(cell).unsqueeze(-1),
                state["holds"].any(-1, keepdim=True),
                any_waiting,
                ~free,
                to_base / size,
                _bearing(to_base),
                to_survivor / size,
                _bearing(to_survivor),
            ),
            -1,
        )
        mission = torch.stack(
            (found.float().mean(-1), state["home"].float().mean(-1), 1 - state["length"] / self._level.limit), -1
        )
        return torch.cat((maps, units.flatten(1), mission), -1)


def _waiting(state: State) -> Tensor:
    """[N, V] whether a survivor still waits at its cell."""
    return ~(state["home"] | state["holds"].any(1))


def _bearing(offset: Tensor) -> Tensor:
    """[.., 4] whether an offset [.., 2] in rows and columns points north, south, west, east."""
    return torch.stack((offset < 0, offset > 0), -1).flatten(-2)


def _broadcast(flags: Tensor, value: Tensor) -> Tensor:
    """Reshape flags [N] to broadcast with a value [N, ..]."""
    return flags.view(-1, *[1] * (value.dim() - 1))


class _Geography:
    """Constants of all maps of one size, as arrays over cells."""

    def __init__(self, size: int) -> None:
        rows, columns = np.divmod(np.arange(size**2), size)
        middle = size // 2
        self.base = middle * size + middle
        self.rows_columns = np.stack((rows, columns), -1)
        self.road = (rows == middle) | (columns == middle)
        self.distance = np.abs(rows[:, None] - rows) + np.abs(columns[:, None] - columns)  # [C, C]
        # [C, C] whether the first cell is on the straight path from a road to the second, along its row or column.
        self.legs = [
            ((fixed[:, None] == fixed) & _between(along[:, None], middle, along)).astype(np.float32)
            for fixed, along in ((rows, columns), (columns, rows))
        ]
        self.next_cell = np.tile(np.arange(size**2)[:, None], ORDERS)  # [C, orders] the cell that an order leads to
        for order, (down, right) in MOVES.items():
            row, column = rows + down, columns + right
            inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
            self.next_cell[inside, order] = (row * size + column)[inside]


def _between(value: np.ndarray, one: int, other: np.ndarray) -> np.ndarray:
    return (np.minimum(one, other) <= value) & (value <= np.maximum(one, other))
