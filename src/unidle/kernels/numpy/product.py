"""Matrix products on a CPU: each by the library that is fastest at its size.

The choice depends on shapes only, never on timing or memory alignment, so that runs repeat bit for bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

# Multiplications up to which OpenBLAS (which is in NumPy's wheels) computes a product in one thread (with a vector:
# below 9,216). Above, torch is as fast and respects its thread limit: the other cores belong to the environments.
_MAX_MATRIX_PRODUCT, _MAX_VECTOR_PRODUCT = 1 << 18, 9000
_ALIGNMENT = 64  # bytes, of tensors that torch allocates
MAX_NUMPY_SIZE = 1 << 13  # numbers; on larger arrays torch's loops are so much faster that its overhead is worth it
# From this many multiplications and columns on, oneDNN's products are worth their overhead. torch.mm calls MKL, which
# does not use AVX512 on AMD processors: oneDNN, which does, takes half the time there.
_MIN_ONEDNN_PRODUCT, _MIN_ONEDNN_WIDTH = 1 << 20, 16
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def _is_small(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether `product` is NumPy's alone for arrays of these shapes; cached, because deciding it takes as long."""
    (rows, inner), columns = left, right[1]
    limit = _MAX_VECTOR_PRODUCT if rows == 1 or columns == 1 else _MAX_MATRIX_PRODUCT
    return inner > 1 and rows * columns <= MAX_NUMPY_SIZE and rows * inner * columns <= limit


def product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product left · right."""
    if _is_small(left.shape, right.shape):
        return np.matmul(left, right, out=out)
    rows, columns = len(left), right.shape[1]
    is_small = rows * columns <= MAX_NUMPY_SIZE
    if len(right) == 1 and is_small:
        return np.multiply(left, right, out=out)
    limit = _MAX_VECTOR_PRODUCT if rows == 1 or columns == 1 else _MAX_MATRIX_PRODUCT
    in_numpy = len(right) > 1 and rows * len(right) * columns <= limit
    if not in_numpy and _suits_onednn(rows, len(right), columns):
        return _onednn_product(left, right, out)
    if out is None and not (in_numpy and is_small):
        out = torch.empty(rows, columns).numpy()  # aligned, so that the next product need not copy it
    if in_numpy:
        return np.matmul(left, right, out=out)
    assert out is not None
    if len(right) == 1:  # NumPy's matmul takes ten times as long
        torch.mul(torch.from_numpy(left), torch.from_numpy(right), out=torch.from_numpy(out))
    else:
        torch.mm(_aligned(left), _aligned(right), out=torch.from_numpy(out))
    return out


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """X · weightᵀ + bias."""
    y: np.ndarray
    if _is_small(x.shape, weight.T.shape):
        y = np.matmul(x, weight.T)
        y += bias
        return y
    if _suits_onednn(len(x), weight.shape[1], len(weight)):
        y = _onednn(x, weight, bias).numpy()
        return y
    y = product(x, weight.T)
    if y.size > MAX_NUMPY_SIZE:
        torch.from_numpy(y).add_(torch.from_numpy(bias))
    else:
        y += bias
    return y


def _suits_onednn(rows: int, inner: int, columns: int) -> bool:
    is_large = rows * inner * columns >= _MIN_ONEDNN_PRODUCT
    return is_large and min(rows, inner, columns) >= _MIN_ONEDNN_WIDTH and _HAS_ONEDNN


def _onednn(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> torch.Tensor:
    # Without an activation: its ReLU turns NaN into 0.
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        _dense(x), _dense(weight), None if bias is None else torch.from_numpy(bias), "none", [], ""
    )
    return y


def _dense(array: np.ndarray) -> torch.Tensor:
    """`array` as a tensor without gaps between rows or columns: with gaps, oneDNN takes 200 times as long."""
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    return torch.from_numpy(array if is_dense else np.ascontiguousarray(array))


def _onednn_product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        result: np.ndarray = _onednn(left, right.T).numpy()
        return result
    if out.flags.c_contiguous:
        torch.from_numpy(out).copy_(_onednn(left, right.T))
    else:  # a transposed array: copying to it in its own order is faster
        torch.from_numpy(out.T).copy_(_onednn(right.T, left))
    return out


def _aligned(array: np.ndarray) -> torch.Tensor:
    """`array` as a tensor with torch's alignment: on some machines the last bits of its products depend on it."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
