"""Which implementation of an operation a run uses, and how two are compared."""

from __future__ import annotations

import warnings

import pytest
import torch

from unidle.kernels.dispatch import Dispatch, compare, restored


def test_a_small_difference_is_accepted_without_a_warning_about_gradients() -> None:
    theirs = torch.linspace(-1, 1, 50, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare("numbers", theirs + 0.001, theirs)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_larger_difference_or_a_nan_is_an_error(wrong: float) -> None:
    theirs = torch.linspace(-1, 1, 50)
    with pytest.raises(RuntimeError, match="the kernel's numbers differ from the reference's"):
        compare("numbers", wrong * theirs, theirs)


def test_tensors_are_restored_on_exit() -> None:
    tensor = torch.ones(3)
    with restored([tensor]) as before:
        tensor.zero_()
        assert before[0].tolist() == [1, 1, 1]
    assert tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_agree_with_themselves_alone(value: float) -> None:
    compare("numbers", torch.tensor([1.0, value]), torch.tensor([1.0, value]))
    with pytest.raises(RuntimeError):
        compare("numbers", torch.tensor([1.0, 2.0]), torch.tensor([1.0, value]))


def test_a_supported_and_verified_implementation_is_chosen() -> None:
    dispatch = Dispatch()
    assert dispatch.choose("work", "reference", lambda: "kernel", lambda implementation: None) == "kernel"
    assert dispatch.fallbacks == {}


def test_an_unsupported_case_keeps_the_reference_and_the_reason_without_a_report() -> None:
    dispatch = Dispatch(lambda *_: pytest.fail("reported"))
    chosen = dispatch.choose("work", "reference", lambda: pytest.fail("built"), lambda _: None, "too large")
    assert chosen == "reference"
    assert dispatch.fallbacks == {"work": "too large"}


def test_an_implementation_that_fails_is_reported_and_the_reference_kept() -> None:
    reports: list[tuple[str, str, str]] = []
    dispatch = Dispatch(lambda operation, error, instead: reports.append((operation, str(error), instead)))

    def verify(implementation: str) -> None:
        raise RuntimeError("they differ")

    assert dispatch.choose("work", "reference", lambda: "kernel", verify) == "reference"
    assert reports == [("work", "they differ", "uses the plain PyTorch implementation")]
    assert dispatch.fallbacks == {"work": "RuntimeError: they differ"}
