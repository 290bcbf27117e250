"""Replay against a plain model that keeps lists; γ = ½ and whole rewards, so that every return is exact.

What holds of every memory (checkpoints, nothing asks the host, capture) is tested here for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from replay_buffers import (
    BOTH,
    CPU,
    GAMMA,
    GOES_ON,
    ROW_BYTES,
    TERMINATED,
    TRUNCATED,
    WIDTH,
    Expected,
    Memory,
    actions_of,
    live,
    make_prioritised,
    make_replay,
    make_task_replay,
    names_of,
    random_step,
    read,
    reward_of,
    rows_of,
    same,
    seeded,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay, Transitions, integers_below
from unidle.errors import UsageError
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.observations import ObservationLayout


@dataclass
class Observation:
    """An observation of a line, and what happened there; no end where no action was taken (final or open)."""

    name: int
    end: int | None = None


class Twin:
    """A replay, and lines as lists of observations."""

    def __init__(self, places: int, n_envs: int, n_steps: int) -> None:
        self.replay = Replay(places * n_envs, n_envs, ROW_BYTES, WIDTH, CPU, GAMMA, n_steps)
        self._places, self._n_steps = places, n_steps
        self._named = 0
        self.lines = [[Observation(self._name())] for _ in range(n_envs)]
        self.replay.start(rows_of([line[-1].name for line in self.lines]))

    def _name(self) -> int:
        self._named += 1
        return self._named

    def step(self, ends: list[int]) -> None:
        acted = [line[-1].name for line in self.lines]
        finals, following = [], []
        for line, end in zip(self.lines, ends):
            line[-1].end = end
            if end != GOES_ON:
                line.append(Observation(self._name()))
            finals.append(line[-1].name if end != GOES_ON else -7)  # never to be seen
            line.append(Observation(self._name()))
            following.append(line[-1].name)
        self.replay.add(
            actions_of(acted),
            torch.tensor([float(reward_of(name)) for name in acted]),
            torch.tensor([end in (TERMINATED, BOTH) for end in ends]),
            torch.tensor([end in (TRUNCATED, BOTH) for end in ends]),
            rows_of(following),
            rows_of(finals),
        )

    def expected(self) -> Expected:
        """Of all transitions among each line's newest observations."""
        return {
            line[i].name: self._outcome(line, i)
            for line in self.lines
            for i in range(max(0, len(line) - self._places), len(line))
            if line[i].end is not None
        }

    def _outcome(self, line: list[Observation], i: int) -> tuple[float, float, int]:
        total, discount = 0.0, 1.0
        for _ in range(self._n_steps):
            total += discount * reward_of(line[i].name)
            discount *= GAMMA
            end = line[i].end
            i += 1
            if end != GOES_ON:
                return total, discount if end == TRUNCATED else 0.0, line[i].name
            if line[i].end is None:  # the newest observation: no further steps yet
                break
        return total, discount, line[i].name


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(n_steps, places, ends [T, N]): rings from the smallest there can be, written round several times."""
    n_steps, n_envs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = n_steps + 2 + draw(st.integers(0, 7))
    often = draw(st.sampled_from([1, 4, 30]))  # episodes of about that many steps
    end = st.sampled_from([GOES_ON] * (often - 1) * 3 + [TERMINATED, TRUNCATED, BOTH])
    step = st.lists(end, min_size=n_envs, max_size=n_envs)
    return n_steps, places, draw(st.lists(step, min_size=1, max_size=40))


# -- Replay ----------------------------------------------------------------------------------------------------------


@given(histories())
def test_samples_are_exactly_the_transitions_that_the_model_holds(history: tuple[int, int, list[list[int]]]) -> None:
    n_steps, places, ends = history
    twin = Twin(places, len(ends[0]), n_steps)
    for step in ends:
        twin.step(step)
        assert twin.replay.count.item() == len(twin.expected())
    batch = twin.replay.sample(2000, seeded())  # of at most 36: none is missed by chance
    assert read(batch) == twin.expected()
    assert batch.weights.tolist() == [1.0] * 2000


@given(histories())
def test_index_is_where_a_transition_lies(history: tuple[int, int, list[list[int]]]) -> None:
    n_steps, places, ends = history
    twin = Twin(places, len(ends[0]), n_steps)
    for step in ends:
        twin.step(step)
    batch = twin.replay.sample(50, seeded())
    for mine, again in zip(batch.tensors(), twin.replay.at(batch.index).tensors()):
        assert torch.equal(mine, again)
    cells = torch.arange(twin.replay.n_cells)[twin.replay.acted]
    assert read(twin.replay.at(cells)) == twin.expected()
    assert len(cells) == len(twin.expected())


def test_a_transition_can_be_sampled_as_soon_as_it_was_added() -> None:
    twin = Twin(places=8, n_envs=1, n_steps=3)
    twin.step([GOES_ON])
    assert read(twin.replay.sample(4, seeded())) == {1: (reward_of(1), 0.5, 2)}
    twin.step([GOES_ON])
    assert read(twin.replay.sample(64, seeded()))[1] == (reward_of(1) + reward_of(2) / 2, 0.25, 3)


def test_a_truncated_episode_bootstraps_from_its_final_observation_and_a_terminated_one_from_nothing() -> None:
    # Observations 1 and 2 are acted in, 3 is final, 4 and 5 are the next episode's, and 6 is open.
    for end, discount in ((TRUNCATED, 0.25), (TERMINATED, 0.0), (BOTH, 0.0)):
        twin = Twin(places=9, n_envs=1, n_steps=4)
        for step in ([GOES_ON], [end], [GOES_ON], [GOES_ON]):
            twin.step(step)
        samples = read(twin.replay.sample(200, seeded()))
        assert samples[1] == (reward_of(1) + reward_of(2) / 2, discount, 3)
        assert samples[2] == (reward_of(2), discount * 2, 3)
        assert samples[4] == (reward_of(4) + reward_of(5) / 2, 0.25, 6)
        assert set(samples) == {1, 2, 4, 5}


def test_rewards_past_the_horizon_are_not_looked_at() -> None:
    twin = Twin(places=6, n_envs=1, n_steps=3)
    for end in (GOES_ON, GOES_ON, TERMINATED):
        twin.step([end])
    twin.replay.rewards[~twin.replay.acted] = torch.nan  # the final, open and unwritten cells
    assert read(twin.replay.sample(200, seeded())) == twin.expected()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_draws_are_uniform_among_lines_that_hold_different_numbers(n_steps: int) -> None:
    twin = Twin(places=12, n_envs=3, n_steps=n_steps)
    for t in range(50):  # the first line ends its episodes after every step, the second sometimes, the third never
        twin.step([TRUNCATED, TERMINATED if t % 4 == 0 else GOES_ON, GOES_ON])
    n_held = [sum(name in twin.expected() for name in (o.name for o in line)) for line in twin.lines]
    assert n_held[0] < n_held[1] < n_held[2]
    n_draws = 60_000
    counts = torch.bincount(twin.replay.draw(n_draws, seeded(1)), minlength=twin.replay.n_cells)
    assert (counts[~twin.replay.acted] == 0).all()
    held = counts[twin.replay.acted].double()
    mean = n_draws / len(held)
    chi_square, freedom = ((held - mean) ** 2 / mean).sum().item(), len(held) - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_draws_reach_every_cell_of_a_ring_larger_than_float32_can_count() -> None:
    draws = integers_below(torch.tensor(2**26), (10_000,), seeded())
    assert torch.bincount(draws % 4, minlength=4).min() > 2000  # float32 draws would be multiples of 4
    assert draws.max() > 2**26 - 2**17


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53, 1.0])
def test_the_most_extreme_draws_stay_inside(extreme: float, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(places=5, n_envs=2, n_steps=1)
    for ends in ([GOES_ON, GOES_ON], [TRUNCATED, GOES_ON], [GOES_ON, GOES_ON]):
        twin.step(ends)
    monkeypatch.setattr(
        torch, "rand", lambda shape, dtype, device, generator: torch.full(shape, extreme, dtype=dtype, device=device)
    )
    (cell,) = twin.replay.draw(1, seeded()).tolist()
    assert twin.replay.acted[cell]
    assert cell % 2 == (extreme > 0)  # the first line's oldest, the last line's newest
    assert names_of(twin.replay.obs[cell : cell + 1]) == ([1] if extreme == 0 else [twin.lines[1][-2].name])


def test_environments_made_anew_cut_their_open_episodes_off() -> None:
    twin = Twin(places=6, n_envs=2, n_steps=3)
    for ends in ([GOES_ON, GOES_ON], [GOES_ON, TERMINATED]):
        twin.step(ends)
    for line in twin.lines:  # in the model: what is open in the first line is final, in the second nothing was done yet
        if line[-2].end is not None:
            line[-2].end = TRUNCATED
            line.append(Observation(twin._name()))
        else:
            line[-1] = Observation(twin._name())
    twin.replay.start(rows_of([line[-1].name for line in twin.lines]))
    assert read(twin.replay.sample(200, seeded())) == twin.expected()
    for _ in range(9):
        twin.step([GOES_ON, GOES_ON])
        assert read(twin.replay.sample(200, seeded())) == twin.expected()
    assert twin.replay.count.item() == len(twin.expected()) == 10


def test_pictures_and_masks_come_back_as_they_were() -> None:
    space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (9, 9, 3), np.uint8), "speed": spaces.Box(-9, 9, (3,), np.float32)}
    )
    layout = ObservationLayout.of(space, mask_width=5)
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.integers(0, 256, (7, 2, layout.obs_bytes), dtype=np.uint8))
    replay = Replay(20, 2, layout.obs_bytes, 1, CPU, GAMMA)
    replay.start(obs[0])
    no, nothing = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    for t in range(6):
        replay.add(torch.full((2, 1), float(t)), nothing, no, no, obs[t + 1], obs[t])
    batch = replay.sample(100, seeded())
    t, line = batch.actions[:, 0].long(), batch.index % 2
    assert torch.equal(batch.obs, obs[t, line])
    assert torch.equal(batch.next_obs, obs[t + 1, line])
    camera = leaf_tensor(batch.obs, layout.leaves[0])
    assert (camera.shape, camera.dtype) == ((100, 9, 9, 3), torch.uint8)


def test_a_replay_too_small_for_its_environments_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match=r"39 transitions is too small for 8 environments; .* at least 40\."):
        Replay(39, 8, ROW_BYTES, WIDTH, CPU, GAMMA, n_steps=3)
    Replay(40, 8, ROW_BYTES, WIDTH, CPU, GAMMA, n_steps=3)


# -- every memory ----------------------------------------------------------------------------------------------------


every_memory = pytest.mark.parametrize("make", [make_replay, make_task_replay, make_prioritised])


@every_memory
def test_a_memory_goes_on_from_its_state_bit_for_bit(make: Callable[[], Any]) -> None:
    old, new, rng = make(), make(), np.random.default_rng(3)
    old.start(torch.zeros(3, ROW_BYTES, dtype=torch.uint8))
    live(old, rng, 25)
    addresses = [value.data_ptr() for value in new.state_dict().values()]
    new.load_state_dict({name: value.clone() for name, value in old.state_dict().items()})
    assert [value.data_ptr() for value in new.state_dict().values()] == addresses
    for memory in (old, new):
        live(memory, np.random.default_rng(4), 2)
    for name, value in old.state_dict().items():
        assert torch.equal(value, new.state_dict()[name]), name
    assert same(old.sample(64, seeded()), new.sample(64, seeded()))


def test_the_state_of_another_number_of_environments_is_refused() -> None:
    one, three = Replay(30, 1, ROW_BYTES, WIDTH, CPU, GAMMA), Replay(30, 3, ROW_BYTES, WIDTH, CPU, GAMMA)
    with pytest.raises(UsageError, match=r"has cursor of shape \(1,\), this run's has \(3,\)"):
        three.load_state_dict(one.state_dict())


def test_a_memory_costs_what_it_says() -> None:
    capacity = 50_000
    replay = Replay(capacity, 1, ROW_BYTES, WIDTH, CPU, GAMMA)
    for memory, slack in (
        (replay, 24),  # the counters
        (TaskReplay(capacity, 1, 1, ROW_BYTES, WIDTH, CPU, GAMMA), 24),
        (Prioritised(replay, 0.6, 0.4), capacity),  # priorities are counted in whole bytes
    ):
        spent = sum(value.nbytes for value in memory.state_dict().values())
        said = capacity * type(memory).bytes_per_place(ROW_BYTES, WIDTH)
        assert abs(spent - said) <= slack


@every_memory
def test_an_empty_memory_gives_transitions_without_weight(make: Callable[[], Any]) -> None:
    batch = make().sample(8, seeded())
    assert batch.weights.tolist() == [0.0] * 8
    assert all(t.isfinite().all() for t in batch.tensors())


@every_memory
def test_what_a_capture_puts_back_undoes_its_warm_up(make: Callable[[], Any]) -> None:
    warmed, plain = make(), make()
    for memory in (warmed, plain):
        memory.start(torch.zeros(3, ROW_BYTES, dtype=torch.uint8))
        live(memory, np.random.default_rng(5), 33)
    step = random_step(warmed, np.random.default_rng(6))
    kept = [counter.clone() for counter in warmed.counters]

    def learn(memory: Memory) -> None:
        memory.add(**step)
        if isinstance(memory, Prioritised):
            memory.update(memory.sample(4, seeded()).index, torch.tensor([1e3, 1.0, 1.0, 1e-3]))

    for _ in range(3):
        learn(warmed)
        for counter, before in zip(warmed.counters, kept):
            counter.copy_(before)
    for memory in (warmed, plain):
        learn(memory)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, warmed.state_dict()[name]), name


class NothingAsked(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU, or depend on values for its shape."""

    REFUSED = ("nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name.rstrip("_").lstrip("_") not in {refused.strip("_") for refused in self.REFUSED}, name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


@every_memory
def test_nothing_asks_the_host(make: Callable[[], Any]) -> None:
    memory, rng = make(), np.random.default_rng(7)
    memory.start(torch.zeros(3, ROW_BYTES, dtype=torch.uint8))
    steps = [random_step(memory, rng) for _ in range(20)]
    generator = seeded()
    with NothingAsked():
        for step in steps:
            memory.add(**step)
            batch = memory.sample(10, generator)  # of four tasks, two give one more
            if isinstance(memory, Prioritised):
                memory.update(batch.index, batch.returns)


def test_the_test_above_sees_a_question() -> None:
    flags = torch.tensor([True, False])
    for ask in (lambda: flags.any().item(), lambda: flags.nonzero(), lambda: flags[flags], lambda: bool(flags[0])):
        with pytest.raises(AssertionError), NothingAsked():
            ask()


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_memory
def test_a_captured_memory_equals_one_on_the_host(make: Callable[..., Any]) -> None:
    device = torch.device("cuda")
    here, there, rng = make(), make(device), np.random.default_rng(10)
    obs = torch.zeros(3, ROW_BYTES, dtype=torch.uint8)
    here.start(obs)
    there.start(obs.to(device))
    static = random_step(there, rng, device)
    generator = seeded(11, device)
    batches: list[Transitions] = []
    kept = [counter.clone() for counter in there.counters]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            there.add(**static)
            there.sample(66, generator)
            for counter, before in zip(there.counters, kept):
                counter.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        there.add(**static)
        batches.append(there.sample(66, generator))
    seen: set[int] = set()
    for _ in range(60):
        step = random_step(here, rng)
        for name, value in step.items():
            static[name].copy_(value)
        here.add(**step)
        graph.replay()
        batch = Transitions(*(t.cpu() for t in batches[0].tensors()))
        seen |= set(batch.index.tolist())
        if not isinstance(here, TaskReplay):
            replay = here.replay if isinstance(here, Prioritised) else here
            for mine, again in zip(batch.tensors()[:-1], replay.at(batch.index).tensors()):
                assert_close(mine, again)
    assert len(seen) > 20
    for name, value in here.state_dict().items():
        assert_close(there.state_dict()[name].cpu(), value)
