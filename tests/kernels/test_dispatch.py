"""Dispatch: which implementation of an operation is chosen, and how two are compared."""

from __future__ import annotations

import warnings

import pytest
import torch

from unidle.kernels.dispatch import Dispatch, compare, restored


def test_compare_accepts_small_difference_without_gradient_warning() -> None:
    expected = torch.linspace(-1, 1, 50, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare("numbers", expected + 0.001, expected)


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_compare_rejects_larger_difference_and_nan(factor: float) -> None:
    expected = torch.linspace(-1, 1, 50)
    with pytest.raises(RuntimeError, match="the kernel's numbers differ from the reference's"):
        compare("numbers", factor * expected, expected)


def test_restored_resets_tensors_on_exit() -> None:
    tensor = torch.ones(3)
    with restored([tensor]) as before:
        tensor.zero_()
        assert before[0].tolist() == [1, 1, 1]
    assert tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_compare_requires_nan_and_infinity_to_match(value: float) -> None:
    compare("numbers", torch.tensor([1.0, value]), torch.tensor([1.0, value]))
    with pytest.raises(RuntimeError):
        compare("numbers", torch.tensor([1.0, 2.0]), torch.tensor([1.0, value]))


def test_supported_and_verified_implementation_is_chosen() -> None:
    dispatch = Dispatch()
    assert dispatch.choose("work", "reference", lambda: "kernel", lambda implementation: None) == "kernel"
    assert dispatch.fallbacks == {}


def test_unsupported_case_falls_back_without_a_report() -> None:
    dispatch = Dispatch(lambda *_: pytest.fail("reported"))
    chosen = dispatch.choose("work", "reference", lambda: pytest.fail("built"), lambda _: None, "too large")
    assert chosen == "reference"
    assert dispatch.fallbacks == {"work": "too large"}


def test_failed_verification_is_reported_and_falls_back() -> None:
    reports: list[tuple[str, str, str]] = []
    dispatch = Dispatch(lambda operation, error, instead: reports.append((operation, str(error), instead)))

    def verify(implementation: str) -> None:
        raise RuntimeError("outputs differ")

    assert dispatch.choose("work", "reference", lambda: "kernel", verify) == "reference"
    assert reports == [("work", "outputs differ", "uses the plain PyTorch implementation")]
    assert dispatch.fallbacks == {"work": "RuntimeError: outputs differ"}
