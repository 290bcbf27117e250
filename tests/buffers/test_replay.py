"""Replay against a model made of plain lists; γ = ½ and integer rewards, so that every return is exact.

What all replay buffers have in common (checkpoints, no host synchronisation, capture) is tested for each of them.
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
    ACTION_WIDTH,
    BOTH,
    CONTINUES,
    CPU,
    GAMMA,
    OBS_BYTES,
    TERMINATED,
    TRUNCATED,
    Expected,
    ReplayBuffer,
    actions_of,
    add_steps,
    equal_transitions,
    ids_of,
    make_prioritised,
    make_replay,
    make_task_replay,
    observations_of,
    random_step,
    read_batch,
    reward_of,
    seeded,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay, Transitions, uniform_integers
from unidle.errors import UsageError
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.observations import ObservationLayout


@dataclass
class Observation:
    """An observation and how its step ended; `end` is None if no action was taken (final or open)."""

    name: int
    end: int | None = None


class ModelledReplay:
    """A replay buffer, and its model: a list of observations for each environment."""

    def __init__(self, places: int, n_envs: int, n_steps: int) -> None:
        self.replay = Replay(places * n_envs, n_envs, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA, n_steps)
        self._places, self._n_steps = places, n_steps
        self._named = 0
        self.histories = [[Observation(self._name())] for _ in range(n_envs)]
        self.replay.start(observations_of([history[-1].name for history in self.histories]))

    def _name(self) -> int:
        self._named += 1
        return self._named

    def step(self, ends: list[int]) -> None:
        acted = [history[-1].name for history in self.histories]
        finals, next_obs = [], []
        for history, end in zip(self.histories, ends):
            history[-1].end = end
            if end != CONTINUES:
                history.append(Observation(self._name()))
            finals.append(history[-1].name if end != CONTINUES else -7)  # must never be read
            history.append(Observation(self._name()))
            next_obs.append(history[-1].name)
        self.replay.add(
            actions_of(acted),
            torch.tensor([float(reward_of(name)) for name in acted]),
            torch.tensor([end in (TERMINATED, BOTH) for end in ends]),
            torch.tensor([end in (TRUNCATED, BOTH) for end in ends]),
            observations_of(next_obs),
            observations_of(finals),
        )

    def expected(self) -> Expected:
        """All transitions among the newest observations of each environment."""
        return {
            history[i].name: self._outcome(history, i)
            for history in self.histories
            for i in range(max(0, len(history) - self._places), len(history))
            if history[i].end is not None
        }

    def _outcome(self, history: list[Observation], i: int) -> tuple[float, float, int]:
        total, discount = 0.0, 1.0
        for _ in range(self._n_steps):
            total += discount * reward_of(history[i].name)
            discount *= GAMMA
            end = history[i].end
            i += 1
            if end != CONTINUES:
                return total, discount if end == TRUNCATED else 0.0, history[i].name
            if history[i].end is None:  # the newest observation has no step yet
                break
        return total, discount, history[i].name


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(n_steps, places, ends [T, N]): rings from the smallest possible size, which wrap around several times."""
    n_steps, n_envs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = n_steps + 2 + draw(st.integers(0, 7))
    mean_length = draw(st.sampled_from([1, 4, 30]))  # of episodes, in steps
    end = st.sampled_from([CONTINUES] * (mean_length - 1) * 3 + [TERMINATED, TRUNCATED, BOTH])
    step = st.lists(end, min_size=n_envs, max_size=n_envs)
    return n_steps, places, draw(st.lists(step, min_size=1, max_size=40))


# -- Replay ----------------------------------------------------------------------------------------------------------


@given(cases())
def test_samples_match_list_model(case: tuple[int, int, list[list[int]]]) -> None:
    n_steps, places, ends = case
    modelled = ModelledReplay(places, len(ends[0]), n_steps)
    for step in ends:
        modelled.step(step)
        assert modelled.replay.count.item() == len(modelled.expected())
    batch = modelled.replay.sample(2000, seeded())  # at most 36 transitions: none is missed by chance
    assert read_batch(batch) == modelled.expected()
    assert batch.weights.tolist() == [1.0] * 2000


@given(cases())
def test_index_points_to_the_transition(case: tuple[int, int, list[list[int]]]) -> None:
    n_steps, places, ends = case
    modelled = ModelledReplay(places, len(ends[0]), n_steps)
    for step in ends:
        modelled.step(step)
    batch = modelled.replay.sample(50, seeded())
    for mine, again in zip(batch.tensors(), modelled.replay.gather(batch.index).tensors()):
        assert torch.equal(mine, again)
    cells = torch.arange(modelled.replay.n_cells)[modelled.replay.has_transition]
    assert read_batch(modelled.replay.gather(cells)) == modelled.expected()
    assert len(cells) == len(modelled.expected())


def test_transition_can_be_sampled_right_after_add() -> None:
    modelled = ModelledReplay(places=8, n_envs=1, n_steps=3)
    modelled.step([CONTINUES])
    assert read_batch(modelled.replay.sample(4, seeded())) == {1: (reward_of(1), 0.5, 2)}
    modelled.step([CONTINUES])
    assert read_batch(modelled.replay.sample(64, seeded()))[1] == (reward_of(1) + reward_of(2) / 2, 0.25, 3)


def test_only_truncated_episode_bootstraps_from_final_observation() -> None:
    # Observations 1 and 2 are acted on, 3 is final, 4 and 5 belong to the next episode, and 6 is open.
    for end, discount in ((TRUNCATED, 0.25), (TERMINATED, 0.0), (BOTH, 0.0)):
        modelled = ModelledReplay(places=9, n_envs=1, n_steps=4)
        for step in ([CONTINUES], [end], [CONTINUES], [CONTINUES]):
            modelled.step(step)
        samples = read_batch(modelled.replay.sample(200, seeded()))
        assert samples[1] == (reward_of(1) + reward_of(2) / 2, discount, 3)
        assert samples[2] == (reward_of(2), discount * 2, 3)
        assert samples[4] == (reward_of(4) + reward_of(5) / 2, 0.25, 6)
        assert set(samples) == {1, 2, 4, 5}


def test_rewards_past_the_episode_end_are_not_read() -> None:
    modelled = ModelledReplay(places=6, n_envs=1, n_steps=3)
    for end in (CONTINUES, CONTINUES, TERMINATED):
        modelled.step([end])
    modelled.replay.rewards[~modelled.replay.has_transition] = torch.nan  # final, open and unwritten cells
    assert read_batch(modelled.replay.sample(200, seeded())) == modelled.expected()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_draws_are_uniform_over_environments_with_unequal_counts(n_steps: int) -> None:
    modelled = ModelledReplay(places=12, n_envs=3, n_steps=n_steps)
    for t in range(50):  # the first environment ends every step, the second sometimes, the third never
        modelled.step([TRUNCATED, TERMINATED if t % 4 == 0 else CONTINUES, CONTINUES])
    n_held = [sum(name in modelled.expected() for name in (o.name for o in history)) for history in modelled.histories]
    assert n_held[0] < n_held[1] < n_held[2]
    n_draws = 60_000
    counts = torch.bincount(modelled.replay.sample_cells(n_draws, seeded(1)), minlength=modelled.replay.n_cells)
    assert (counts[~modelled.replay.has_transition] == 0).all()
    held = counts[modelled.replay.has_transition].double()
    mean = n_draws / len(held)
    chi_square, freedom = ((held - mean) ** 2 / mean).sum().item(), len(held) - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_draws_reach_every_cell_of_a_ring_beyond_float32_precision() -> None:
    draws = uniform_integers(torch.tensor(2**26), (10_000,), seeded())
    assert torch.bincount(draws % 4, minlength=4).min() > 2000  # float32 draws would be multiples of 4
    assert draws.max() > 2**26 - 2**17


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53, 1.0])
def test_extreme_random_numbers_draw_valid_cells(extreme: float, monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = ModelledReplay(places=5, n_envs=2, n_steps=1)
    for ends in ([CONTINUES, CONTINUES], [TRUNCATED, CONTINUES], [CONTINUES, CONTINUES]):
        modelled.step(ends)
    monkeypatch.setattr(
        torch, "rand", lambda shape, dtype, device, generator: torch.full(shape, extreme, dtype=dtype, device=device)
    )
    (cell,) = modelled.replay.sample_cells(1, seeded()).tolist()
    assert modelled.replay.has_transition[cell]
    assert cell % 2 == (extreme > 0)  # the oldest of the first environment, or the newest of the last
    assert ids_of(modelled.replay.obs[cell : cell + 1]) == ([1] if extreme == 0 else [modelled.histories[1][-2].name])


def test_restart_truncates_open_episodes() -> None:
    modelled = ModelledReplay(places=6, n_envs=2, n_steps=3)
    for ends in ([CONTINUES, CONTINUES], [CONTINUES, TERMINATED]):
        modelled.step(ends)
    # In the model, an open episode with steps is truncated; one without steps is replaced.
    for history in modelled.histories:
        if history[-2].end is not None:
            history[-2].end = TRUNCATED
            history.append(Observation(modelled._name()))
        else:
            history[-1] = Observation(modelled._name())
    modelled.replay.start(observations_of([history[-1].name for history in modelled.histories]))
    assert read_batch(modelled.replay.sample(200, seeded())) == modelled.expected()
    for _ in range(9):
        modelled.step([CONTINUES, CONTINUES])
        assert read_batch(modelled.replay.sample(200, seeded())) == modelled.expected()
    assert modelled.replay.count.item() == len(modelled.expected()) == 10


def test_images_and_masks_are_stored_unchanged() -> None:
    space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (9, 9, 3), np.uint8), "speed": spaces.Box(-9, 9, (3,), np.float32)}
    )
    layout = ObservationLayout.of(space, mask_width=5)
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.integers(0, 256, (7, 2, layout.obs_bytes), dtype=np.uint8))
    replay = Replay(20, 2, layout.obs_bytes, 1, CPU, GAMMA)
    replay.start(obs[0])
    no_end, no_reward = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    for t in range(6):
        replay.add(torch.full((2, 1), float(t)), no_reward, no_end, no_end, obs[t + 1], obs[t])
    batch = replay.sample(100, seeded())
    t, env = batch.actions[:, 0].long(), batch.index % 2
    assert torch.equal(batch.obs, obs[t, env])
    assert torch.equal(batch.next_obs, obs[t + 1, env])
    camera = leaf_tensor(batch.obs, layout.leaves[0])
    assert (camera.shape, camera.dtype) == ((100, 9, 9, 3), torch.uint8)


def test_too_small_capacity_is_rejected_with_the_minimum() -> None:
    with pytest.raises(UsageError, match=r"39 transitions is too small for 8 environments; .* at least 40\."):
        Replay(39, 8, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA, n_steps=3)
    Replay(40, 8, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA, n_steps=3)


# -- every replay buffer -----------------------------------------------------------------------------------------------


each_buffer = pytest.mark.parametrize("make", [make_replay, make_task_replay, make_prioritised])


@each_buffer
def test_loaded_buffer_continues_bit_for_bit(make: Callable[[], Any]) -> None:
    old, new, rng = make(), make(), np.random.default_rng(3)
    old.start(torch.zeros(3, OBS_BYTES, dtype=torch.uint8))
    add_steps(old, rng, 25)
    addresses = [value.data_ptr() for value in new.state_dict().values()]
    new.load_state_dict({name: value.clone() for name, value in old.state_dict().items()})
    assert [value.data_ptr() for value in new.state_dict().values()] == addresses
    for buffer in (old, new):
        add_steps(buffer, np.random.default_rng(4), 2)
    for name, value in old.state_dict().items():
        assert torch.equal(value, new.state_dict()[name]), name
    assert equal_transitions(old.sample(64, seeded()), new.sample(64, seeded()))


def test_state_with_other_n_envs_is_rejected() -> None:
    one, three = Replay(30, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA), Replay(30, 3, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    with pytest.raises(UsageError, match=r"has cursor of shape \(1,\), this run's has \(3,\)"):
        three.load_state_dict(one.state_dict())


def test_bytes_per_transition_matches_allocated_memory() -> None:
    capacity = 50_000
    replay = Replay(capacity, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA)
    for buffer, slack in (
        (replay, 24),  # the counters
        (TaskReplay(capacity, 1, 1, OBS_BYTES, ACTION_WIDTH, CPU, GAMMA), 24),
        (Prioritised(replay, 0.6, 0.4), capacity),  # `bytes_per_transition` rounds priorities to whole bytes
    ):
        allocated = sum(value.nbytes for value in buffer.state_dict().values())
        declared = capacity * type(buffer).bytes_per_transition(OBS_BYTES, ACTION_WIDTH)
        assert abs(allocated - declared) <= slack


@each_buffer
def test_empty_buffer_samples_have_zero_weight(make: Callable[[], Any]) -> None:
    batch = make().sample(8, seeded())
    assert batch.weights.tolist() == [0.0] * 8
    assert all(t.isfinite().all() for t in batch.tensors())


@each_buffer
def test_restoring_counters_undoes_capture_warm_up(make: Callable[[], Any]) -> None:
    warmed_up, plain = make(), make()
    for buffer in (warmed_up, plain):
        buffer.start(torch.zeros(3, OBS_BYTES, dtype=torch.uint8))
        add_steps(buffer, np.random.default_rng(5), 33)
    step = random_step(warmed_up, np.random.default_rng(6))
    kept = [counter.clone() for counter in warmed_up.counters]

    def learn(buffer: ReplayBuffer) -> None:
        buffer.add(**step)
        if isinstance(buffer, Prioritised):
            buffer.update(buffer.sample(4, seeded()).index, torch.tensor([1e3, 1.0, 1.0, 1e-3]))

    for _ in range(3):
        learn(warmed_up)
        for counter, before in zip(warmed_up.counters, kept):
            counter.copy_(before)
    for buffer in (warmed_up, plain):
        learn(buffer)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, warmed_up.state_dict()[name]), name


class NoHostSync(TorchDispatchMode):
    """Rejects operations that would make the host wait for a GPU, or whose output shape depends on values."""

    REJECTED = ("nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name.rstrip("_").lstrip("_") not in {rejected.strip("_") for rejected in self.REJECTED}, name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


@each_buffer
def test_buffer_never_synchronises_with_host(make: Callable[[], Any]) -> None:
    buffer, rng = make(), np.random.default_rng(7)
    buffer.start(torch.zeros(3, OBS_BYTES, dtype=torch.uint8))
    steps = [random_step(buffer, rng) for _ in range(20)]
    generator = seeded()
    with NoHostSync():
        for step in steps:
            buffer.add(**step)
            batch = buffer.sample(10, generator)  # not a multiple of the four tasks
            if isinstance(buffer, Prioritised):
                buffer.update(batch.index, batch.returns)


def test_no_host_sync_detects_synchronisation() -> None:
    flags = torch.tensor([True, False])
    for synchronise in (
        lambda: flags.any().item(),
        lambda: flags.nonzero(),
        lambda: flags[flags],
        lambda: bool(flags[0]),
    ):
        with pytest.raises(AssertionError), NoHostSync():
            synchronise()


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_buffer
def test_captured_buffer_matches_buffer_on_host(make: Callable[..., Any]) -> None:
    device = torch.device("cuda")
    on_host, on_gpu, rng = make(), make(device), np.random.default_rng(10)
    obs = torch.zeros(3, OBS_BYTES, dtype=torch.uint8)
    on_host.start(obs)
    on_gpu.start(obs.to(device))
    static = random_step(on_gpu, rng, device)
    generator = seeded(11, device)
    batches: list[Transitions] = []
    kept = [counter.clone() for counter in on_gpu.counters]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            on_gpu.add(**static)
            on_gpu.sample(66, generator)
            for counter, before in zip(on_gpu.counters, kept):
                counter.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        on_gpu.add(**static)
        batches.append(on_gpu.sample(66, generator))
    seen: set[int] = set()
    for _ in range(60):
        step = random_step(on_host, rng)
        for name, value in step.items():
            static[name].copy_(value)
        on_host.add(**step)
        graph.replay()
        batch = Transitions(*(t.cpu() for t in batches[0].tensors()))
        seen |= set(batch.index.tolist())
        if not isinstance(on_host, TaskReplay):
            replay = on_host.replay if isinstance(on_host, Prioritised) else on_host
            for mine, again in zip(batch.tensors()[:-1], replay.gather(batch.index).tensors()):
                assert_close(mine, again)
    assert len(seen) > 20
    for name, value in on_host.state_dict().items():
        assert_close(on_gpu.state_dict()[name].cpu(), value)
