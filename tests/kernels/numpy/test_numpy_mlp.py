"""Products must not depend on where in memory their numbers lie, for that depends on what was done before."""

from __future__ import annotations

from itertools import product as every

import numpy as np
import pytest

from unidle.kernels.numpy.mlp import product


def at(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins so many bytes after a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy = room[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize(
    "shape",
    [(64, 17, 64), (64, 64, 64), (65, 64, 64), (8, 256, 256), (33, 65, 129), (1, 64, 64), (1, 256, 64), (256, 64, 1)],
)
@pytest.mark.parametrize("turned", [False, True], ids=["as they are", "turned"])
def test_a_product_has_the_same_bits_wherever_its_numbers_lie(shape: tuple[int, int, int], turned: bool) -> None:
    obs, inner, columns = shape
    random = np.random.default_rng(0)
    left = random.standard_normal((obs, inner)).astype(np.float32)
    right = random.standard_normal((columns, inner) if turned else (inner, columns)).astype(np.float32)
    results = []
    for left_at, right_at, out_at in every((0, 16, 48), (0, 16, 48), (None, 0, 32)):
        out = None if out_at is None else at(np.zeros((obs, columns), np.float32), out_at)
        other = at(right, right_at)
        results.append(product(at(left, left_at), other.T if turned else other, out).copy())
        assert out is None or np.array_equal(out, results[-1])
    np.testing.assert_allclose(results[0], left @ (right.T if turned else right), rtol=1e-3, atol=1e-3)
    assert all(np.array_equal(result, results[0]) for result in results)
