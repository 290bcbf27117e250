"""Permutations by one kernel."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 4097])
def test_a_shuffle_leaves_nothing_out_and_its_key_decides_the_order(n: int) -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.shuffle import shuffle

    first, again, other = (shuffle(n, torch.Generator(DEVICE).manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.sort().values.cpu(), torch.arange(n))
    assert torch.equal(first, again)
    assert n < 64 or not torch.equal(first, other)


def test_every_number_comes_to_every_place_as_often_as_to_any_other() -> None:
    pytest.importorskip("triton")
    from unidle.kernels.triton.shuffle import shuffle

    n, times = 12, 120 if INTERPRETED else 3000
    generator = torch.Generator(DEVICE).manual_seed(3)
    seen = torch.zeros(n, n)
    following = torch.zeros(n, n)
    for _ in range(times):
        order = shuffle(n, generator).cpu()
        seen[torch.arange(n), order] += 1
        following[order[:-1], order[1:]] += 1
    expected = times / n  # also of each ordered pair: n − 1 of n (n − 1) are neighbours
    # Chi-squared with 121 and about as many degrees of freedom: mean 121, deviation 16.
    assert ((seen - expected).square() / expected).sum() < 121 + 5 * 16
    off = ~torch.eye(n, dtype=torch.bool)
    assert ((following - expected)[off].square() / expected).sum() < 121 + 5 * 16
