"""Matrix products must not depend on the memory alignment of their operands, which varies between runs."""

from __future__ import annotations

from itertools import product as cartesian_product

import numpy as np
import pytest

from unidle.kernels.numpy.mlp import product


def copy_at_offset(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize(
    "shape",
    [(64, 17, 64), (64, 64, 64), (65, 64, 64), (8, 256, 256), (33, 65, 129), (1, 64, 64), (1, 256, 64), (256, 64, 1)],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_product_is_independent_of_memory_alignment_bit_for_bit(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inner, columns = shape
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, inner)).astype(np.float32)
    right = rng.standard_normal((columns, inner) if transposed else (inner, columns)).astype(np.float32)
    results = []
    for left_at, right_at, out_at in cartesian_product((0, 16, 48), (0, 16, 48), (None, 0, 32)):
        out = None if out_at is None else copy_at_offset(np.zeros((rows, columns), np.float32), out_at)
        other = copy_at_offset(right, right_at)
        results.append(product(copy_at_offset(left, left_at), other.T if transposed else other, out).copy())
        assert out is None or np.array_equal(out, results[-1])
    np.testing.assert_allclose(results[0], left @ (right.T if transposed else right), rtol=1e-3, atol=1e-3)
    assert all(np.array_equal(result, results[0]) for result in results)
