"""The sum tree against a plain array, and PER against the formulas of Schaul et al. (2016)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from unidle.buffers.prioritised import Prioritised, SumTree
from unidle.buffers.replay import Replay

CPU = torch.device("cpu")
SIZES = st.sampled_from([1, 2, 127, 128, 129, 300, 16_384, 16_385, 40_000])  # one, two and three levels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tree_of(values: np.ndarray) -> SumTree:
    tree = SumTree(len(values), CPU)
    tree.update(torch.arange(len(values)), torch.from_numpy(values))
    return tree


def positions(batch_size: int, seed: int) -> np.ndarray:
    """[B] the positions that a batch with this seed draws, as fractions of the total."""
    draws = torch.rand(batch_size, dtype=torch.float64, generator=seeded(seed)).numpy()
    return (np.arange(batch_size) + draws) / batch_size


# -- SumTree ---------------------------------------------------------------------------------------------------------


@given(SIZES, st.integers(0, 2**32 - 1))
def test_parents_are_sums_of_children_after_updates(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, plain = SumTree(size, CPU), np.zeros(size)
    for _ in range(6):
        index = rng.integers(0, min(size, 50), 40) * rng.integers(1, max(2, size // 50))  # with many duplicates
        index = np.minimum(index, size - 1)
        value = rng.choice([0.0, 1e-9, 1.0, 1e9], 40) * rng.random(40)
        tree.update(torch.from_numpy(index), torch.from_numpy(value))
        for i in set(index.tolist()):
            plain[i] = value[index == i].max()
        assert tree.leaves.tolist() == plain.tolist()
        for below, above in zip(tree.levels, tree.levels[1:]):
            assert_close(above.view(-1)[: len(below)], below.sum(1), rtol=1e-14, atol=0)
            assert (above.view(-1)[len(below) :] == 0).all()
        assert len(tree.levels[-1]) == 1
        assert_close(tree.total.item(), plain.sum(), rtol=1e-12, atol=0)


@given(SIZES, st.integers(0, 2**32 - 1))
def test_samples_match_cumulative_sum(size: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 4, size).astype(float)  # whole numbers: sums are exact
    values[seed % size] = 3.0
    samples = tree_of(values).sample(500, seeded(seed))
    expected = np.searchsorted(values.cumsum(), positions(500, seed) * values.sum(), side="right")
    assert samples.tolist() == expected.tolist()


@given(SIZES, st.integers(0, 2**32 - 1))
def test_leaf_counts_follow_leaf_values(size: int, seed: int) -> None:
    # A leaf covers whole strata, each drawn from once, and parts of two more.
    rng = np.random.default_rng(seed)
    values = rng.random(size) ** 8
    counts = np.bincount(tree_of(values).sample(3000, seeded(seed)).numpy(), minlength=size)
    assert np.abs(counts - 3000 * values / values.sum()).max() < 2


def test_draws_cover_the_whole_stratum() -> None:
    tree, generator = tree_of(np.array([1.0, 2.0, 3.0, 4.0])), seeded()
    counts = torch.stack([torch.bincount(tree.sample(1, generator), minlength=4) for _ in range(4000)]).sum(0)
    expected = torch.tensor([400.0, 800.0, 1200.0, 1600.0])
    assert ((counts - expected) ** 2 / expected).sum() < 3 + 4 * 6**0.5


def constant_rand(value: float) -> Callable[..., Tensor]:
    return lambda *shape, dtype, device, generator: torch.full(shape, value, dtype=dtype, device=device)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53, 1.0])
@given(SIZES, st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 64]))
def test_zero_leaf_is_never_drawn(draw: float, size: int, seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.zeros(size)
    filled = rng.integers(0, size, rng.integers(1, 6))  # few nonzero leaves among many zeros
    values[filled] = 10.0 ** rng.integers(-12, 12, len(filled)) * (0.1 + rng.random(len(filled)))
    tree = tree_of(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", constant_rand(draw))
        assert (tree.leaves[tree.sample(batch, seeded())] > 0).all()


def test_rounding_error_in_sums_draws_last_nonzero_leaf() -> None:
    values = np.zeros(300)
    values[[3, 140, 150]] = 1.0, 2.0, 3.0
    for level in (1, 0):  # as if summed in another order, with a much larger error
        tree = tree_of(values)
        tree.levels[level].mul_(1 + 1e-3) if level else tree.levels[0].mul_(1 - 1e-3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", constant_rand(1.0))
            assert tree.sample(1, seeded()).tolist() == [150]


def test_draw_on_a_boundary_takes_the_next_leaf() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", constant_rand(0.0))
        assert tree_of(np.array([1.0, 0.0, 1.0, 2.0])).sample(4, seeded()).tolist() == [0, 2, 3, 3]


def test_draws_from_empty_tree_are_valid_indices() -> None:
    assert SumTree(300, CPU).sample(4, seeded()).max() < 300


# -- Prioritised -----------------------------------------------------------------------------------------------------


def make_prioritised(
    places: int = 8, n_envs: int = 2, alpha: float = 0.5, beta: float = 0.5, eps: float = 0
) -> Prioritised:
    buffer = Prioritised(Replay(places * n_envs, n_envs, 8, 1, CPU, 0.5), alpha, beta, eps)
    buffer.start(torch.zeros(n_envs, 8, dtype=torch.uint8))
    return buffer


def add(buffer: Prioritised, *ended: bool) -> None:
    n_envs = len(buffer.replay.cursor)
    truncated = torch.tensor(ended or [False] * n_envs)
    obs = torch.zeros(n_envs, 8, dtype=torch.uint8)
    buffer.add(torch.zeros(n_envs, 1), torch.zeros(n_envs), torch.zeros_like(truncated), truncated, obs, obs)


def test_priorities_and_weights_match_the_paper() -> None:
    # α = ½: |δ| = 1, 4, 16, 25 → p = 1, 2, 4, 5 of 12. N P = 4 p / 12; β = ½, so w ∝ p^-½, and the largest is 1.
    buffer = make_prioritised()
    add(buffer)
    add(buffer)
    cells = torch.arange(16)[buffer.replay.has_transition]
    buffer.update(cells, torch.tensor([1.0, -4.0, 16.0, -25.0]))
    priority = dict(zip(cells.tolist(), (1.0, 2.0, 4.0, 5.0)))
    batch = buffer.sample(1200, seeded())
    counts = torch.bincount(batch.index, minlength=16)
    assert all(abs(counts[cell].item() - 100 * p) < 2 for cell, p in priority.items())
    expected = torch.tensor([priority[cell] ** -0.5 for cell in batch.index.tolist()])
    assert_close(batch.weights, expected)
    buffer.beta.fill_(1.0)
    batch = buffer.sample(1200, seeded())
    assert_close(batch.weights, torch.tensor([1 / priority[cell] for cell in batch.index.tolist()]))


def test_weights_are_divided_by_largest_of_the_batch() -> None:
    buffer = make_prioritised(beta=1.0)
    add(buffer)
    first, second = torch.arange(16)[buffer.replay.has_transition].tolist()
    buffer.update(torch.tensor([first, second]), torch.tensor([1e-12, 1e12]))  # p = 10⁻⁶ and 10⁶
    batch = buffer.sample(10, seeded())
    assert batch.index.tolist() == [second] * 10
    assert batch.weights.tolist() == [1.0] * 10


def test_epsilon_keeps_priority_of_zero_error_positive() -> None:
    buffer = make_prioritised(eps=0.25)
    add(buffer)
    cells = torch.arange(16)[buffer.replay.has_transition]
    buffer.update(cells, torch.tensor([0.0, 2.0]))
    assert buffer.tree.leaves[cells].tolist() == [0.5, 1.5]


def test_alpha_0_is_uniform_replay() -> None:
    buffer = make_prioritised(alpha=0.0, beta=0.7)
    for t in range(30):
        add(buffer, t % 5 == 0, t % 7 == 0)
        batch = buffer.sample(64, seeded(t))
        assert batch.weights.tolist() == [1.0] * 64
        buffer.update(batch.index, torch.rand(64, generator=seeded(t)) * 100)
    counts = torch.bincount(buffer.sample(3000, seeded()).index, minlength=16)
    assert (counts[buffer.replay.has_transition] - 3000 / buffer.count).abs().max() < 2


def test_new_transitions_get_highest_priority_so_far() -> None:
    buffer = make_prioritised()
    add(buffer)
    cells = torch.arange(16)[buffer.replay.has_transition]
    assert buffer.tree.leaves[cells].tolist() == [1.0, 1.0]
    buffer.update(cells, torch.tensor([49.0, 0.01]))
    buffer.update(cells, torch.tensor([0.01, 0.01]))  # the highest priority stays 7
    add(buffer)
    new = buffer.replay.after(buffer.replay.cursor, -1)
    assert buffer.tree.leaves[new].tolist() == [7.0, 7.0]


@given(st.integers(1, 3), st.integers(3, 9), st.integers(0, 2**32 - 1))
def test_leaf_is_positive_exactly_for_cells_with_a_transition(n_envs: int, places: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffer = make_prioritised(places, n_envs, eps=1e-6)
    stale = torch.zeros(8, dtype=torch.long)
    for t in range(30):
        add(buffer, *(rng.random(n_envs) < 0.3).tolist())
        assert torch.equal(buffer.tree.leaves > 0, buffer.replay.has_transition)
        buffer.update(stale, torch.from_numpy(rng.standard_normal(8)))  # the batch was drawn before the add
        assert torch.equal(buffer.tree.leaves > 0, buffer.replay.has_transition)
        if t == 17:  # environments restart
            buffer.start(torch.zeros(n_envs, 8, dtype=torch.uint8))
            assert torch.equal(buffer.tree.leaves > 0, buffer.replay.has_transition)
        batch = buffer.sample(8, seeded(t))
        assert buffer.replay.has_transition[batch.index].all()
        stale = batch.index
    assert_close(buffer.tree.total, buffer.tree.leaves.sum())


@pytest.mark.parametrize("error", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_error_gets_highest_priority(error: float) -> None:
    buffer = make_prioritised()
    add(buffer)
    cells = torch.arange(16)[buffer.replay.has_transition]
    buffer.update(cells, torch.tensor([error, 9.0]))
    assert buffer.tree.leaves[cells].tolist() == [1.0, 3.0]  # the highest priority so far
    assert (buffer.highest.item(), buffer.tree.total.item()) == (3.0, 4.0)


def test_errors_are_detached() -> None:
    buffer = make_prioritised()
    add(buffer)
    cells = torch.arange(16)[buffer.replay.has_transition]
    buffer.update(cells, torch.tensor([4.0, 9.0], requires_grad=True) * 1.0)
    assert not buffer.tree.total.requires_grad
