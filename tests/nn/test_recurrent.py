"""The recurrent layer: sequences, single steps and resets at episode starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unidle.nn.recurrent import RecurrentCore

N, STEPS, FEATURES, SIZE = 4, 9, 3, 5


def core_and_input(kind: str) -> tuple[RecurrentCore, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    core = RecurrentCore(kind, FEATURES, SIZE)
    return core, torch.randn(N, STEPS, FEATURES), torch.randn(N, core.state_size)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_sequence_without_starts_matches_torch_layer(kind: str) -> None:
    core, features, state = core_and_input(kind)
    layer = (nn.LSTM if kind == "lstm" else nn.GRU)(FEATURES, SIZE, batch_first=True)
    layer.load_state_dict({f"{name}_l0": value for name, value in core.cell.state_dict().items()})
    first = tuple(part.contiguous().unsqueeze(0) for part in state.split(SIZE, -1))
    expected, _ = layer(features, first if kind == "lstm" else first[0])
    torch.testing.assert_close(core(features, torch.zeros(N, STEPS, dtype=torch.bool), state), expected)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_sequence_matches_single_steps_with_state_resets(kind: str) -> None:
    core, features, state = core_and_input(kind)
    starts = torch.rand(N, STEPS, generator=torch.Generator().manual_seed(2)) < 0.3
    starts[0, 0], starts[1, 0] = True, False
    assert starts.any(0).sum() > 2  # several resets
    whole = core(features, starts, state)
    for t in range(STEPS):
        state = core.step(features[:, t], torch.where(starts[:, t, None], 0.0, state))
        torch.testing.assert_close(whole[:, t], state[:, :SIZE])


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_state_does_not_cross_episode_start(kind: str) -> None:
    core, features, state = core_and_input(kind)
    starts = torch.zeros(N, STEPS, dtype=torch.bool)
    starts[:, 4] = True
    other = features.clone()
    other[:, :4] += 1.0
    one, two = core(features, starts, state), core(other, starts, state + 1.0)
    assert torch.equal(one[:, 4:], two[:, 4:])
    assert not torch.equal(one[:, :4], two[:, :4])


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_initial_weights_are_orthogonal_with_zero_bias(kind: str) -> None:
    core, _, _ = core_and_input(kind)
    for name, weight in core.cell.named_parameters():
        if "bias" in name:
            assert (weight == 0).all()
        else:
            torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5, rtol=0)
