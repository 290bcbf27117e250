"""How a faster way is compared with the plain one."""

from __future__ import annotations

import warnings

import pytest
import torch

from unidle.kernels.dispatch import compare, restored


def test_what_differs_by_little_is_the_same_and_nobody_is_warned_of_gradients() -> None:
    theirs = torch.linspace(-1, 1, 50, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare("numbers", theirs + 0.001, theirs)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_what_differs_by_more_or_is_no_number_is_told(wrong: float) -> None:
    theirs = torch.linspace(-1, 1, 50)
    with pytest.raises(RuntimeError, match="the kernel's numbers differ from the reference's"):
        compare("numbers", wrong * theirs, theirs)


def test_what_happens_inside_is_undone() -> None:
    tensor = torch.ones(3)
    with restored([tensor]) as before:
        tensor.zero_()
        assert before[0].tolist() == [1, 1, 1]
    assert tensor.tolist() == [1, 1, 1]
