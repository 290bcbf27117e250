"""The shuffle kernel gives uniform permutations."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 1025])  # the last has three numbers outside for each inside
def test_shuffle_is_a_permutation_determined_by_the_seed(n: int) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.shuffle import shuffle

    first, again, other = (shuffle(n, torch.Generator(DEVICE).manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.sort().values.cpu(), torch.arange(n))
    assert torch.equal(first, again)
    assert n < 64 or not torch.equal(first, other)


def test_shuffle_is_uniform_over_positions_and_neighbours() -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.shuffle import shuffle

    n, times = 12, 120 if INTERPRETED else 3000
    generator = torch.Generator(DEVICE).manual_seed(3)
    counts = torch.zeros(n, n)
    pair_counts = torch.zeros(n, n)
    for _ in range(times):
        order = shuffle(n, generator).cpu()
        counts[torch.arange(n), order] += 1
        pair_counts[order[:-1], order[1:]] += 1
    expected = times / n  # also for ordered pairs: n − 1 of n (n − 1) are neighbours
    # Chi-squared with 121 degrees of freedom, or about as many: mean 121, standard deviation 16.
    assert ((counts - expected).square() / expected).sum() < 121 + 5 * 16
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    assert ((pair_counts - expected)[off_diagonal].square() / expected).sum() < 121 + 5 * 16
