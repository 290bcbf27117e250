"""PPO's formulas against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unidle.algos.ppo import approximate_kl, clipped_policy_loss, explained_variance, value_loss


def numbers(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


CLIP = numbers(0.25)[0]  # exact in binary


def test_policy_loss_takes_minimum_of_ratio_and_clipped_ratio() -> None:
    #   r     A    r A    clip(r) A   min
    #   1     2    2      2           2
    #   1.5   2    3      2.5         2.5   a good action, already likely enough: clipped
    #   1.5  −2   −3     −2.5        −3     a bad action that became likelier: not clipped
    #   0.5   2    1      1.5         1     a good action that became rarer: not clipped
    #   0.5  −2   −1     −1.5        −1.5   a bad action, already rare enough: clipped
    ratio, advantages = numbers(1, 1.5, 1.5, 0.5, 0.5), numbers(2, 2, -2, 2, -2)
    for r, a, expected in zip(ratio, advantages, (2, 2.5, -3, 1, -1.5)):
        assert clipped_policy_loss(r, a, CLIP).item() == -expected
    assert clipped_policy_loss(ratio, advantages, CLIP).item() == pytest.approx(-(2 + 2.5 - 3 + 1 - 1.5) / 5)


def test_policy_gradient_is_zero_where_clip_is_active() -> None:
    ratio, advantages = numbers(1, 1.5, 1.5, 0.5, 0.5, grad=True), numbers(2, 2, -2, 2, -2)
    clipped_policy_loss(ratio, advantages, CLIP).backward()
    # The loss is a mean over five: −A / 5 where the ratio is not clipped.
    assert ratio.grad.tolist() == pytest.approx([-0.4, 0.0, 0.4, -0.4, 0.0])


def test_value_loss_without_clipping_is_mean_squared_error() -> None:
    # (1 − 2)² = 1, (3 − 0)² = 9
    loss = value_loss(numbers(1, 3), numbers(100, 100), numbers(2, 0), None)
    assert loss.item() == 5.0


def test_value_loss_clips_values_around_old_ones() -> None:
    # Around old values of 0, 1 is clipped to 0.5 and −3 to −0.5; 0.25 stays. Returns of 1: 0.5² + 1.5² + 0.75² = 3.0625
    values = numbers(1, -3, 0.25, grad=True)
    loss = value_loss(values, numbers(0, 0, 0), numbers(1, 1, 1), 0.5)
    assert loss.item() == pytest.approx(3.0625 / 3)
    loss.backward()
    # Only the value within the clip range has a gradient: 2 · (0.25 − 1) / 3
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, -0.5])


def test_approximate_kl_is_mean_of_r_minus_1_minus_log_r() -> None:
    # r = 2: 2 − 1 − ln 2; r = ½: ½ − 1 + ln 2. Mean: (½) / 2
    assert approximate_kl(numbers(math.log(2), -math.log(2))).item() == pytest.approx(0.25)
    assert approximate_kl(numbers(0, 0)).item() == 0.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_approximate_kl_is_never_negative(log_ratios: list[float]) -> None:
    assert approximate_kl(numbers(*log_ratios)).item() >= -1e-15


def test_approximate_kl_estimates_kl_of_two_gaussians() -> None:
    # KL(N(0,1) ‖ N(m,1)) = m² / 2; samples from the old policy.
    noise = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = 0.1
    log_ratio = -0.5 * (noise - shift) ** 2 + 0.5 * noise**2
    assert approximate_kl(log_ratio).item() == pytest.approx(shift**2 / 2, rel=0.02)


def test_explained_variance_is_1_for_perfect_and_0_for_constant_critic() -> None:
    returns = numbers(1, 2, 3, 4)
    assert explained_variance(returns, returns).item() == 1.0
    assert explained_variance(numbers(7, 7, 7, 7), returns).item() == 0.0
    # A critic with the opposite sign has residuals 2 G: 1 − Var[2 G] / Var[G] = 1 − 4
    assert explained_variance(-returns, returns).item() == pytest.approx(-3.0)
    # Residuals 1, 1, −1, −1: Var = 4/3 against 5/3
    assert explained_variance(numbers(0, 1, 4, 5), returns).item() == pytest.approx(1 - 4 / 5)


def test_explained_variance_of_constant_returns_is_finite() -> None:
    assert math.isfinite(explained_variance(numbers(1, 2, 3), numbers(5, 5, 5)).item())
