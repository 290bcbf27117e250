"""Matrix products must not depend on the memory alignment of their operands, which varies between runs."""

from __future__ import annotations

from itertools import product as cartesian_product

import numpy as np
import pytest

from unidle.kernels.numpy.product import linear, product


def copy_at_offset(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize(
    "shape",
    [
        *[(64, 17, 64), (64, 64, 64), (65, 64, 64), (8, 256, 256), (33, 65, 129)],
        *[(1, 64, 64), (1, 256, 64), (256, 64, 1)],
        *[(256, 256, 256), (100, 300, 401), (256, 23, 256)],  # oneDNN's
    ],
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


@pytest.mark.parametrize("shape", [(64, 32, 48), (256, 256, 256), (17, 23, 300)])
def test_product_writes_to_a_transposed_array(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    rng = np.random.default_rng(1)
    left, right = rng.standard_normal((inner, rows), np.float32).T, rng.standard_normal((inner, columns), np.float32)
    out = np.zeros((columns, rows), np.float32)
    assert product(left, right, out.T).base is out
    np.testing.assert_allclose(out.T, left @ right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("widths", [(4, 2), (64, 64), (256, 256), (23, 256)])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_linear_is_product_plus_bias(rows: int, widths: tuple[int, int], transposed: bool) -> None:
    rng, (inner, columns) = np.random.default_rng(2), widths
    x, bias = rng.standard_normal((rows, inner), np.float32), rng.standard_normal(columns, np.float32)
    weight = rng.standard_normal((columns, inner), np.float32)
    given = np.ascontiguousarray(weight.T).T if transposed else weight
    np.testing.assert_allclose(linear(x, given, bias), x @ weight.T + bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [17, 256])
def test_operands_may_have_gaps_between_rows(width: int) -> None:
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((256, width + 1), np.float32)[:, :width], rng.standard_normal((256, 256), np.float32)
    out = np.empty((256, width), np.float32)
    np.testing.assert_allclose(product(dy.T, x, out), dy.T @ x, rtol=1e-3, atol=1e-3)
    weight = rng.standard_normal((256, width), np.float32)
    np.testing.assert_allclose(linear(x, weight, np.zeros(256, np.float32)), x @ weight.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [2, 256])
def test_nan_stays_in_its_row(rows: int) -> None:
    x, weight = np.ones((rows, 256), np.float32), np.ones((256, 256), np.float32)
    x[1, 3] = np.nan
    y = linear(x, weight, np.zeros(256, np.float32))
    assert np.isnan(y[1]).all()
    assert not np.isnan(np.delete(y, 1, 0)).any()
