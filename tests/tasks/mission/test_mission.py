"""The mission task: the tensor environment against the Gymnasium one, maps, rules, rendering."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import DOCS
from torch.utils._python_dispatch import TorchDispatchMode

from unidle.engine.cuda_graphs import Capture
from unidle.envs.device.device_env import MaskedDeviceEnv, State, uniform
from unidle.envs.make import env_maker
from unidle.errors import UsageError
from unidle.tasks.mission.device_env import Mission
from unidle.tasks.mission.gym_env import MissionEnv, random_numbers
from unidle.tasks.mission.render import CELL, PANEL
from unidle.tasks.mission.rules import (
    ACT,
    EAST,
    LEVELS,
    MOVES,
    NORTH,
    OPEN,
    ORDERS,
    ROCK,
    ROUGH,
    SOUTH,
    STAY,
    WEST,
)

EXACT = {"rtol": 0.0, "atol": 1e-6}
levels = pytest.mark.parametrize("level", LEVELS)


def walk_lengths(ground: np.ndarray, goal: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Length of the shortest walk from each cell of a map [size, size] to `goal` (breadth-first search)."""
    lengths, queue = {goal: 0}, [goal]
    while queue:
        row, column = queue.pop(0)
        for down, right in MOVES.values():
            cell = row + down, column + right
            inside = 0 <= cell[0] < len(ground) and 0 <= cell[1] < len(ground)
            if inside and cell not in lengths and ground[cell] != ROCK:
                lengths[cell] = lengths[row, column] + 1
                queue.append(cell)
    return lengths


class Planner:
    """Scripted policy that sees all of N missions: carriers fetch the nearest survivor, other units move at random."""

    def __init__(self, env: Mission, level: int, random_share: list[float]) -> None:
        self.env, self.rules = env, LEVELS[level]
        self.random_share = random_share  # per mission: the probability of a random allowed order
        self.rng = np.random.default_rng(level)
        self.walks: dict[Any, dict[tuple[int, int], int]] = {}

    def orders(self, state: State) -> np.ndarray:
        mask = self.env.mask(state).view(self.env.n_envs, -1, ORDERS).tolist()
        now = {name: value.numpy() for name, value in state.items()}
        return np.array([[self.order(now, i, u, mask[i][u]) for u in range(len(mask[i]))] for i in range(len(mask))])

    def order(self, state: dict[str, np.ndarray], index: int, unit: int, mask: list[int]) -> int:
        if self.rng.random() >= self.random_share[index]:
            planned = self.plan(state, index, unit)
            if mask[planned]:
                return planned
        allowed = [order for order in range(ORDERS) if mask[order]]
        return allowed[int(self.rng.random() * len(allowed))]

    def plan(self, state: dict[str, np.ndarray], index: int, unit: int) -> int:
        rules, cell = self.rules, int(state["cell"][index, unit])
        if not rules.scouts <= unit < rules.scouts + rules.carriers:
            return int(self.rng.integers(ORDERS))
        home, held = state["home"][index], state["holds"][index]
        goals = state["place"][index][~(home | held.any(0))].tolist()
        if held[unit].any() or not goals or state["battery"][index, unit] < 0.4 * rules.battery:
            goals = [rules.cells // 2 + rules.size // 2]  # base
        if cell in goals:
            return ACT
        row, column = divmod(cell, rules.size)
        walk = min((self.walk(state, index, goal) for goal in goals), key=lambda walk: walk[row, column])
        return min(MOVES, key=lambda move: walk.get((row + MOVES[move][0], column + MOVES[move][1]), 999))

    def walk(self, state: dict[str, np.ndarray], index: int, goal: int) -> dict[tuple[int, int], int]:
        key = index, int(state["episode"][index]), goal
        if key not in self.walks:
            ground = state["ground"][index].reshape(self.rules.size, -1)
            self.walks[key] = walk_lengths(ground, divmod(goal, self.rules.size))
        return self.walks[key]


# -- device env against gym env ----------------------------------------------------------------------------------------


@levels
def test_device_env_steps_match_the_gym_env(level: int) -> None:
    random_share, steps, first = [1.0, 0.5, 0.2, 0.2, 0.2], 410, 3
    n_envs, rng = len(random_share), np.random.default_rng(level)
    env = Mission(n_envs, 11, first_index=first, level=level)
    gym_envs = [MissionEnv(level) for _ in range(n_envs)]
    state, _ = env.begin()
    for index, gym_env in enumerate(gym_envs):
        gym_env.reset(seed=11, options={"env": first + index})
        nearest = int(env._distance[env._base][state["place"][index]].argmin())
        for survivor in range(LEVELS[level].survivors):  # all but the nearest are home, so that some missions succeed
            gym_env.survivors[survivor].home = survivor != nearest
            state["home"][index, survivor] = survivor != nearest
    observation = env._observe(state)
    shown = [(gym_env._observation(), gym_env._info()) for gym_env in gym_envs]
    planner = Planner(env, level, random_share)
    events = dict.fromkeys(("terminated", "truncated", "picked up", "stuck", "refused", "recharged"), 0)
    for _ in range(steps):
        mask = env.mask(state)
        np.testing.assert_allclose(observation, [expected for expected, _ in shown], **EXACT)
        np.testing.assert_array_equal(mask, [info["action_mask"] for _, info in shown])
        action = planner.orders(state)
        if rng.random() < 0.1:
            action = rng.integers(0, ORDERS, action.shape)  # some of these are not allowed
        before = state
        state, step = env.step(state, torch.from_numpy(action).float())
        observation = step.observation
        outcomes = [gym_env.step(orders) for gym_env, orders in zip(gym_envs, action)]
        finals, rewards, terminated, truncated, infos = zip(*outcomes)
        np.testing.assert_allclose(step.final_observation, finals, **EXACT)
        np.testing.assert_allclose(step.reward, rewards, rtol=0, atol=1e-5)
        assert step.terminated.tolist() == list(terminated)
        assert step.truncated.tolist() == list(truncated)
        ended = [one or other for one, other in zip(terminated, truncated)]
        shown = [
            gym_env.reset() if end else current for gym_env, end, current in zip(gym_envs, ended, zip(finals, infos))
        ]
        allowed = mask.view(n_envs, -1, ORDERS)
        events["terminated"] += sum(terminated)
        events["truncated"] += sum(truncated)
        events["picked up"] += int((state["holds"] & ~before["holds"]).sum())
        events["stuck"] += int((allowed.sum(-1) == 1).sum())
        events["refused"] += int((allowed.gather(-1, torch.from_numpy(action)[..., None]) == 0).sum())
        events["recharged"] += int((state["battery"] > before["battery"])[~torch.tensor(ended)].sum())
    missing_events = {event for event, count in events.items() if count == 0}
    assert missing_events <= ({"stuck"} if level == 1 else set()), events  # level 1 has enough battery and comms range


@given(seed=st.integers(0, 2**63 - 1), env=st.integers(0, 2**20), episode=st.integers(0, 2**20))
def test_gym_env_draws_the_same_random_numbers_as_the_device(seed: int, env: int, episode: int) -> None:
    ours = uniform(seed, torch.tensor([env]), torch.tensor([episode]), 9)[0]
    assert ours.tolist() == random_numbers(seed, env, episode, 9)


@levels
def test_gym_env_reset_selects_env_and_episode(level: int) -> None:
    env = Mission(2, 4, first_index=7, level=level)
    state, _ = env.begin()
    state["length"] = torch.tensor([LEVELS[level].limit - 1, 0])
    state["episode"] = torch.tensor([30, 0])
    _, step = env.step(state, torch.zeros(2, len(LEVELS[level].kinds)))
    assert step.truncated.tolist() == [True, False]
    expected, _ = MissionEnv(level).reset(seed=4, options={"env": 7, "episode": 31})
    np.testing.assert_allclose(step.observation[0], expected, **EXACT)


# -- maps --------------------------------------------------------------------------------------------------------------


@levels
@given(seed=st.integers(0, 2**63 - 1))
def test_every_survivor_can_be_reached_and_brought_home(level: int, seed: int) -> None:
    rules, n_envs = LEVELS[level], 4
    state, _ = Mission(n_envs, seed, level=level).begin()
    base = (rules.size // 2, rules.size // 2)
    for index in range(n_envs):
        ground = state["ground"][index].reshape(rules.size, rules.size).numpy()
        walks = walk_lengths(ground, base)
        places = [divmod(place, rules.size) for place in state["place"][index].tolist()]
        assert len(set(places)) == rules.survivors
        for place in places:
            assert walks[place] == abs(place[0] - base[0]) + abs(place[1] - base[1]) > 2
            # Battery: there and back over rough ground. Comms: through relays on the way.
            assert rules.battery >= 2 * 2 * walks[place]
            assert rules.comms * (1 + rules.relays) >= walks[place]


def test_step_limit_allows_one_carrier_to_fetch_every_survivor() -> None:
    for rules in LEVELS.values():
        assert rules.limit >= rules.survivors * (2 * rules.size + 3)  # there, pick up, back, put down, recharge


def test_terrain_shares_are_as_specified_and_roads_have_no_rock() -> None:
    state, _ = Mission(2000, 0).begin()
    ground = state["ground"].reshape(2000, 8, 8).long()
    shares = torch.stack([(ground == kind).float().mean(0) for kind in (OPEN, ROUGH, ROCK)])
    road = torch.zeros(8, 8, dtype=torch.bool)
    road[4], road[:, 4] = True, True
    expected = torch.where(road, torch.tensor([0.75, 0.25, 0.0])[:, None, None], 0.0)
    expected += torch.where(road, 0.0, torch.tensor([0.5625, 0.25, 0.1875])[:, None, None])
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.05)  # 5 standard deviations
    assert (shares[2][road] == 0).all()


def test_survivors_are_spread_over_the_whole_map() -> None:
    state, _ = Mission(2000, 0).begin()
    counts = torch.bincount(state["place"].flatten(), minlength=64).reshape(8, 8)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    far = (rows - 4).abs() + (columns - 4).abs() > 2
    assert (counts[~far] == 0).all()
    assert (counts[far] > 20).all()


def test_ties_place_survivors_on_later_cells_in_both_envs() -> None:
    numbers = [0.5] * 64
    numbers[1] = 0.75
    places = Mission(1, 0)._places(torch.zeros(1, 64, dtype=torch.bool), torch.tensor([numbers]))
    gym_env = MissionEnv(1)
    gym_env.ground = dict.fromkeys(np.ndindex(8, 8), OPEN)
    assert places.tolist() == [[1, 63]]
    assert [survivor.cell for survivor in gym_env._hide_survivors(numbers)] == [(0, 1), (7, 7)]


# -- rules, in hand-made situations ------------------------------------------------------------------------------------


def situation(level: int, cells: list[tuple[int, int]], **changes: Any) -> tuple[Mission, State]:
    """One mission on open ground, units on `cells`; `rough`, `rock` and `place` are lists of cells."""
    env, rules = Mission(1, 0, level=level), LEVELS[level]
    state, _ = env.begin()
    numbers = {name: [row * rules.size + column for row, column in changes.get(name, [])] for name in ("rough", "rock")}
    ground = torch.full((1, rules.cells), OPEN, dtype=torch.uint8)
    ground[:, numbers["rough"]], ground[:, numbers["rock"]] = ROUGH, ROCK
    state["ground"] = ground
    state["cell"] = torch.tensor([[row * rules.size + column for row, column in cells]])
    place = changes.get("place", [(0, column) for column in range(rules.survivors)])
    state["place"] = torch.tensor([[row * rules.size + column for row, column in place]])
    if "battery" in changes:
        state["battery"] = torch.tensor([changes["battery"]])
    return env, state


def allowed(env: Mission, state: State) -> list[set[int]]:
    return [set(np.flatnonzero(unit)) for unit in env.mask(state).view(-1, ORDERS).numpy()]


def order(env: Mission, state: State, *orders: int) -> tuple[State, Any]:
    return env.step(state, torch.tensor([orders]).float())


def test_unit_moves_as_ordered_but_not_onto_rock_or_off_map() -> None:
    env, state = situation(1, [(0, 0), (3, 3)], rock=[(2, 3), (3, 4)])
    assert allowed(env, state) == [{STAY, SOUTH, EAST, ACT}, {STAY, SOUTH, WEST}]  # a survivor lies at (0, 0)
    moved, _ = order(env, state, SOUTH, WEST)
    assert moved["cell"].tolist() == [[8, 3 * 8 + 2]]
    stayed, _ = order(env, state, NORTH, EAST)
    assert torch.equal(stayed["cell"], state["cell"])
    assert torch.equal(stayed["battery"], state["battery"])


def test_moving_costs_the_units_weight_doubled_on_rough_ground() -> None:
    env, state = situation(2, [(2, 2), (2, 2), (6, 6)], rough=[(1, 2), (6, 6)])
    full = LEVELS[2].battery
    moved, _ = order(env, state, NORTH, NORTH, NORTH)  # a scout and two carriers; the second leaves rough ground
    assert (full - moved["battery"]).tolist() == [[4, 2, 1]]
    moved, _ = order(env, state, SOUTH, STAY, STAY)
    assert (full - moved["battery"]).tolist() == [[2, 0, 0]]


def test_unit_moves_only_if_its_battery_suffices() -> None:
    env, state = situation(2, [(2, 2), (2, 2), (2, 2)], rough=[(1, 2)], battery=[3, 1, 0])
    assert allowed(env, state) == [{STAY, SOUTH, WEST, EAST}, {STAY, SOUTH, WEST, EAST}, {STAY}]
    state["battery"] = torch.tensor([[1, 2, 1]])
    assert allowed(env, state)[0] == {STAY}
    assert NORTH in allowed(env, state)[1]
    moved, _ = order(env, state, SOUTH, NORTH, NORTH)
    assert moved["battery"].tolist() == [[1, 0, 1]]


def test_base_recharges_a_battery_that_is_not_full() -> None:
    env, state = situation(2, [(5, 5), (5, 5), (5, 6)], battery=[0, 44, 7])
    assert allowed(env, state)[0] == {STAY, ACT}
    assert ACT not in allowed(env, state)[1]
    assert ACT not in allowed(env, state)[2]
    moved, step = order(env, state, ACT, STAY, ACT)
    assert moved["battery"].tolist() == [[44, 44, 7]]
    assert step.reward.item() == pytest.approx(0.01 * int((moved["known"] & ~state["known"]).sum()) - 0.02)


def test_survivor_is_picked_up_carried_and_dropped_at_base() -> None:
    env, state = situation(1, [(3, 4), (7, 7)], place=[(3, 4), (0, 0)])
    assert ACT in allowed(env, state)[0]
    state, step = order(env, state, ACT, STAY)
    assert step.reward.item() == pytest.approx(1.0 - 0.02)
    assert state["holds"].tolist() == [[[True, False], [False, False]]]
    assert ACT not in allowed(env, state)[0]
    state, step = order(env, state, SOUTH, STAY)
    assert step.reward.item() == pytest.approx(-0.02)
    assert allowed(env, state)[0] >= {ACT}
    state, step = order(env, state, ACT, STAY)
    assert step.reward.item() == pytest.approx(5.0 - 0.02)
    assert state["home"].tolist() == [[True, False]]
    assert not state["holds"].any()
    assert state["battery"][0, 0] == LEVELS[1].battery - 1  # only the next order recharges it
    assert not step.terminated.any()


def test_first_of_two_carriers_gets_the_survivor() -> None:
    env, state = situation(1, [(1, 1), (1, 1)], place=[(6, 6), (1, 1)])
    state, step = order(env, state, ACT, ACT)
    assert state["holds"].tolist() == [[[False, True], [False, False]]]
    assert step.reward.item() == pytest.approx(1.0 - 0.02)
    assert ACT not in allowed(env, state)[1]


def test_only_carriers_pick_up_and_only_one_survivor() -> None:
    env, state = situation(3, [(3, 6), (3, 6), (7, 7), (3, 6)], place=[(3, 6), (0, 0), (0, 1)])
    assert [ACT in orders for orders in allowed(env, state)] == [False, True, False, False]
    state["holds"][0, 1, 1] = True
    assert ACT not in allowed(env, state)[1]


def test_last_survivor_terminates_even_at_the_step_limit() -> None:
    env, state = situation(1, [(4, 4), (4, 4)])
    state["home"][0, 0], state["holds"][0, 1, 1] = True, True
    state["length"][:] = LEVELS[1].limit - 1
    after, step = order(env, state, STAY, ACT)
    assert step.terminated.tolist() == [True]
    assert step.truncated.tolist() == [False]
    assert step.final_observation[0, -3:].tolist() == [1.0, 1.0, 0.0]
    assert step.observation[0, -3:].tolist() == [1.0, 0.0, 1.0]
    assert (after["episode"].item(), after["length"].item()) == (1, 0)
    _, step = order(env, state, STAY, STAY)
    assert step.terminated.tolist() == [False]
    assert step.truncated.tolist() == [True]


def test_only_finished_missions_are_reset() -> None:
    env = Mission(3, 0, level=2)
    state, _ = env.begin()
    state["length"] = torch.tensor([79, 78, 0])
    after, step = env.step(state, torch.full((3, 3), float(WEST)))
    assert after["length"].tolist() == [0, 79, 1]
    assert after["episode"].tolist() == [1, 0, 0]
    assert [torch.equal(step.observation[i], step.final_observation[i]) for i in range(3)] == [False, True, True]
    assert torch.equal(after["ground"][1:], state["ground"][1:])
    assert not torch.equal(after["ground"][0], state["ground"][0])


def test_unit_out_of_comms_range_stays_until_a_relay_reaches_it() -> None:
    # Range 6 from base at (6, 6): scout, two carriers, relay.
    env, state = situation(3, [(6, 6), (0, 7), (0, 6), (6, 6)])
    assert allowed(env, state)[1] == {STAY}  # 7 away
    assert len(allowed(env, state)[2]) > 1  # 6 away
    stayed, step = order(env, state, STAY, EAST, STAY, STAY)
    assert torch.equal(stayed["cell"], state["cell"])
    assert cut_off(step.observation, 3) == [0, 1, 0, 0]
    for relay, heard in (((0, 6), True), ((5, 6), True), ((7, 6), False), ((0, 8), False)):
        state["cell"][0, 3] = relay[0] * 12 + relay[1]
        assert (len(allowed(env, state)[1]) > 1) == heard, relay


def cut_off(observation: torch.Tensor, level: int) -> list[int]:
    """Per unit, whether its observation says that it is out of comms range."""
    return observation[0, 4 * LEVELS[level].cells : -3].view(-1, 20)[:, 1].int().tolist()


def test_orders_pass_through_a_chain_of_relays_but_not_scouts() -> None:
    # Range 6 from base at (8, 8): two scouts, two carriers, two relays.
    chain = [(8, 8), (8, 8), (0, 1), (8, 8), (2, 3), (5, 5)]
    env, state = situation(4, chain)
    assert len(allowed(env, state)[2]) > 1
    env, state = situation(4, [(2, 3), (5, 5), (0, 1), (8, 8), (8, 8), (8, 8)])
    assert allowed(env, state)[2] == {STAY}
    env, state = situation(4, [*chain[:5], (8, 7)])
    assert allowed(env, state)[2] == allowed(env, state)[4] == {STAY}


def test_fog_hides_terrain_and_survivors_until_seen() -> None:
    env, state = situation(2, [(5, 5), (5, 5), (5, 5)], place=[(5, 0), (0, 0)], rough=[(5, 0)], rock=[(4, 1)])
    cells, (survivor_cell, rock_cell) = 100, (50, 41)
    before = env._observe(state)[0]
    assert before[[survivor_cell, rock_cell]].tolist() == [1, 1]  # unknown
    assert not before[cells : 4 * cells].any()
    state, step = order(env, state, WEST, STAY, STAY)  # from 5 cells away to 4, a scout's range of sight
    visible = step.final_observation[0]
    assert visible[[survivor_cell, rock_cell]].tolist() == [0, 0]
    assert visible[cells : 2 * cells].nonzero().flatten().tolist() == [survivor_cell]
    assert visible[2 * cells : 3 * cells].nonzero().flatten().tolist() == [rock_cell]
    assert visible[3 * cells : 4 * cells].nonzero().flatten().tolist() == [survivor_cell]
    # Minus the step cost; nine new cells form the edge of a diamond of radius 4.
    assert step.reward.item() == pytest.approx(9 * 0.01 + 0.5 - 0.02)
    _, step = order(env, state, EAST, STAY, STAY)
    assert torch.equal(step.final_observation[0, : 4 * cells], visible[: 4 * cells])  # what is known stays known
    assert step.reward.item() == pytest.approx(-0.02)


def test_map_is_fully_known_without_fog() -> None:
    state, observation = Mission(3, 0, level=1).begin()
    assert not observation[:, :64].any()
    assert (observation[:, -3] == 1).all()
    assert torch.equal(observation[:, 128:192], (state["ground"] == ROCK).float())


def test_unit_observation_contains_itself_base_and_nearest_survivor() -> None:
    env, state = situation(1, [(0, 2), (7, 4)], place=[(2, 4), (1, 1)], battery=[25, 100])
    state["holds"][0, 1, 0] = True
    _, step = order(env, state, EAST, STAY)
    first, second = step.final_observation[0, 256:-3].view(2, 20)
    #        battery, cut off, carries, called | rock or edge N S W E | base: rows, columns, N S W E | survivor likewise
    assert first.tolist() == pytest.approx(
        [0.24, 0, 0, 1, 1, 0, 0, 0, 4 / 8, 1 / 8, 0, 1, 0, 1, 1 / 8, -2 / 8, 0, 1, 1, 0]
    )
    assert second.tolist() == pytest.approx([1, 0, 1, 1, 0, 1, 0, 0, -3 / 8, 0, 1, 0, 0, 0, -6 / 8, -3 / 8, 1, 0, 1, 0])
    assert step.final_observation[0, -1].item() == pytest.approx(1 - 1 / 50)


# -- whole episodes ----------------------------------------------------------------------------------------------------


def test_scripted_planner_solves_level_1() -> None:
    env = Mission(24, 2)
    state, _ = env.begin()
    planner = Planner(env, 1, [0.0] * 24)
    solved = torch.zeros(24, dtype=torch.bool)
    for _ in range(LEVELS[1].limit):
        state, step = env.step(state, torch.from_numpy(planner.orders(state)).float())
        solved |= step.terminated
    assert solved.all()


@levels
def test_units_never_stand_on_rock_or_overdraw_their_battery(level: int) -> None:
    env = Mission(32, level, level=level)
    state, observation = env.begin()
    generator = torch.Generator().manual_seed(0)
    lowest = LEVELS[level].battery
    for _ in range(60):
        mask = env.mask(state).view(32, -1, ORDERS)
        assert (mask[..., STAY] == 1).all()
        assert observation.abs().max() <= 1
        weights = mask.float() * torch.tensor([0.1, 1, 1, 1, 1, 1])
        action = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(32, -1)
        state, step = env.step(state, action.float())
        observation = step.observation
        assert (state["ground"].gather(1, state["cell"]) != ROCK).all()
        assert state["battery"].min() >= 0
        lowest = min(lowest, int(state["battery"].min()))
    assert lowest < 0.6 * LEVELS[level].battery


@levels
def test_maps_are_reproducible_and_differ_by_env_episode_and_seed(level: int) -> None:
    env = Mission(300, 5, level=level)
    state, first = env.begin()
    assert torch.equal(first, Mission(300, 5, level=level).begin()[1])
    assert torch.equal(first[10:], Mission(290, 5, first_index=10, level=level).begin()[1])
    assert len(torch.unique(state["ground"], dim=0)) == 300
    assert len(torch.unique(state["place"], dim=0)) > 150
    assert (Mission(300, 6, level=level).begin()[0]["ground"] != state["ground"]).any(-1).all()
    over = {**state, "length": torch.full((300,), LEVELS[level].limit)}
    after, _ = env.step(over, torch.zeros(300, len(LEVELS[level].kinds)))
    assert (after["ground"] != state["ground"]).any(-1).all()


@levels
def test_step_needs_no_host_access(level: int) -> None:
    class ForbidHostTensors(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "lift_fresh" not in str(function), "a tensor was created from Python data"
            return function(*args, **(kwargs or {}))

    env = Mission(4, 0, device="meta", level=level)  # meta tensors have no values: reading one fails
    state, _ = env.begin()
    with ForbidHostTensors():
        after, step = env.step(state, torch.zeros(4, len(LEVELS[level].kinds), device="meta"))
        mask = env.mask(after)
    assert {name: (value.shape, value.dtype) for name, value in after.items()} == {
        name: (value.shape, value.dtype) for name, value in state.items()
    }
    assert mask.shape == (4, len(LEVELS[level].kinds) * ORDERS)
    assert step.observation.shape == (4, *env.observation_space.shape)


@pytest.mark.gpu
@levels
def test_captured_steps_match_cpu_steps(level: int) -> None:
    device, n_envs = torch.device("cuda"), 64
    ours, reference = Mission(n_envs, 3, device, level=level), Mission(n_envs, 3, level=level)
    (state, observation), (expected, _) = ours.begin(), reference.begin()
    action = torch.zeros(n_envs, len(LEVELS[level].kinds), device=device)

    def take_step() -> None:
        moved, step = ours.step(state, action)
        for name, value in state.items():
            value.copy_(moved[name])
        observation.copy_(step.observation)

    messages: list[str] = []
    run = Capture(device, messages.append)("mission", take_step, [*state.values(), observation])
    generator = torch.Generator().manual_seed(0)
    for _ in range(LEVELS[level].limit + 10):
        allowed = reference.mask(expected).view(-1, ORDERS).float()
        orders = torch.multinomial(allowed, 1, generator=generator).view(n_envs, -1).float()
        action.copy_(orders)
        run()
        expected, step = reference.step(expected, orders)
        torch.testing.assert_close(observation.cpu(), step.observation, **EXACT)
        assert torch.equal(ours.mask(state).cpu(), reference.mask(expected))
    assert messages == []


# -- Gymnasium environment ---------------------------------------------------------------------------------------------


def test_seeded_reset_repeats_and_unseeded_reset_advances() -> None:
    env, again = MissionEnv(2), MissionEnv(2)
    first, second = env.reset(seed=9)[0], env.reset()[0]
    assert not np.array_equal(first, second)
    assert np.array_equal(again.reset(seed=9)[0], first)
    assert np.array_equal(again.reset()[0], second)
    assert np.array_equal(env.reset(seed=9)[0], first)
    assert not np.array_equal(MissionEnv(2).reset()[0], MissionEnv(2).reset()[0])


def test_render_shows_a_unit_that_moved() -> None:
    env = MissionEnv(3, render_mode="rgb_array")
    _, info = env.reset(seed=1)
    before = env.render()
    assert before.shape == (12 * CELL, 12 * CELL + PANEL, 3)
    assert before.dtype == np.uint8
    move = int(np.flatnonzero(info["action_mask"][ORDERS : 2 * ORDERS])[1])  # of a carrier, which sees nothing new
    env.step([STAY, move, STAY, STAY])
    changed = (env.render() != before).any(-1)[:, : 12 * CELL].reshape(12, CELL, 12, CELL).any((1, 3))
    down, right = MOVES[move]
    assert set(zip(*np.nonzero(changed))) == {(6, 6), (6 + down, 6 + right)}


def test_render_dims_unknown_cells_and_marks_carriers() -> None:
    env = MissionEnv(3, render_mode="rgb_array")
    env.reset(seed=1)
    before = env.render()
    corner, base = np.s_[:CELL, :CELL], np.s_[6 * CELL : 7 * CELL, 6 * CELL : 7 * CELL]
    env.known.add((0, 0))
    assert env.render()[corner].mean() > before[corner].mean() + 20
    env.units[1].carries = env.survivors[0]
    assert (env.render()[base] != before[base]).any()
    without_render = MissionEnv(3)
    without_render.reset(seed=1)
    assert without_render.render() is None


def test_env_id_makes_both_envs_at_a_level() -> None:
    maker = env_maker("unidle/Mission-v0", {"level": 3})
    on_device, gym_env = maker.device_env(2, 0), cloudpickle.loads(cloudpickle.dumps(maker.on_host()))()
    assert isinstance(on_device, MaskedDeviceEnv)
    assert isinstance(gym_env, MissionEnv)
    assert on_device.observation_space == gym_env.observation_space
    assert on_device.action_space == gym_env.action_space
    assert on_device.observation_space.shape == (4 * 144 + 20 * 4 + 3,)
    assert on_device.episode_limit == LEVELS[3].limit


def test_docs_table_matches_the_levels() -> None:
    lines = (DOCS / "device-environments.md").read_text().splitlines()
    for number, rules in LEVELS.items():
        units = f"{rules.scouts}, {rules.carriers}, {rules.relays}"
        fog = "yes" if rules.fog else "no"
        cells = [number, f"{rules.size} × {rules.size}", units, rules.survivors, rules.battery, fog, rules.comms]
        assert f"| {' | '.join(map(str, [*cells, rules.limit]))} |" in lines


def test_unknown_level_is_refused() -> None:
    for make in (lambda: Mission(1, 0, level=5), lambda: MissionEnv(5)):
        with pytest.raises(UsageError, match="levels 1 to 4"):
            make()


def test_gym_env_does_not_import_torch() -> None:
    code = "import sys, unidle.tasks.mission.gym_env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
