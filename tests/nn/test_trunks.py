from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unidle.nn.trunks import ACTIVATIONS, PictureEncoder, RecurrentCore, mlp, orthogonal
from unidle.spaces.observations import image_axes


def picture_encoder(shape: tuple[int, ...]) -> PictureEncoder:
    torch.manual_seed(0)
    axes = image_axes(shape)
    assert axes is not None
    return PictureEncoder(shape, *axes)


def random_pictures(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(84, 84, 4), (3, 40, 64), (36, 36), (12, 35, 3), (2, 8, 8), (8, 8), (10, 9, 1)])
def test_pictures_of_any_size_and_order_become_512_features(shape: tuple[int, ...]) -> None:
    encoder = picture_encoder(shape)
    features = encoder(random_pictures(2, 3, *shape))
    assert features.shape == (2, 3, 512)
    assert torch.isfinite(features).all()


@pytest.mark.parametrize(("height", "width"), [(40, 44), (9, 12)])
def test_a_picture_gives_the_same_features_channels_first_or_last(height: int, width: int) -> None:
    first, last = picture_encoder((3, height, width)), picture_encoder((height, width, 3))
    last.load_state_dict(first.state_dict())
    pictures = random_pictures(4, 3, height, width)
    torch.testing.assert_close(last(pictures.movedim(1, -1)), first(pictures))


@pytest.mark.parametrize("size", [40, 9])
def test_a_picture_without_channels_is_one_with_a_single_channel(size: int) -> None:
    flat, deep = picture_encoder((size, size)), picture_encoder((1, size, size))
    deep.load_state_dict(flat.state_dict())
    pictures = random_pictures(4, size, size)
    torch.testing.assert_close(flat(pictures), deep(pictures.unsqueeze(1)))


def test_large_pictures_get_the_layers_of_the_nature_dqn() -> None:
    encoder = picture_encoder((84, 84, 4))
    layers = [layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in layers] == [
        (4, 32, 8, 4),
        (32, 64, 4, 2),
        (64, 64, 3, 1),
    ]
    assert encoder.project[0].in_features == 64 * 7 * 7


def test_pixels_are_scaled_to_one() -> None:
    encoder = picture_encoder((8, 8))
    white = torch.full((1, 8, 8), 255, dtype=torch.uint8)
    expected = encoder.project(encoder.convolutions(torch.ones(1, 1, 8, 8)))
    torch.testing.assert_close(encoder(white), expected)


# -- perceptrons -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_has_an_activation_after_each_of_its_layers(activation: str) -> None:
    net = mlp(3, (5, 7), activation)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Linear, ACTIVATIONS[activation], nn.Linear, ACTIVATIONS[activation]]
    assert net(torch.zeros(2, 4, 3)).shape == (2, 4, 7)


def test_an_mlp_without_layers_passes_its_input_on() -> None:
    values = torch.randn(2, 3)
    assert torch.equal(mlp(3, (), "tanh")(values), values)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (8, 3), (3, 8)])
def test_weights_start_orthogonal_with_their_gain_and_biases_at_zero(inputs: int, outputs: int) -> None:
    layer = orthogonal(nn.Linear(inputs, outputs), gain=1.5)
    weight = layer.weight if outputs <= inputs else layer.weight.T
    torch.testing.assert_close(weight @ weight.T, 1.5**2 * torch.eye(min(inputs, outputs)), atol=1e-5, rtol=0)
    assert (layer.bias == 0).all()


def test_hidden_layers_and_convolutions_start_with_gain_root_two() -> None:
    linear = mlp(6, (6,), "tanh")[0].weight
    torch.testing.assert_close(linear @ linear.T, 2 * torch.eye(6), atol=1e-5, rtol=0)
    kernel = picture_encoder((84, 84, 4)).convolutions[0].weight.flatten(1)
    torch.testing.assert_close(kernel @ kernel.T, 2 * torch.eye(32), atol=1e-5, rtol=0)
    assert math.isclose(kernel.norm(dim=1).mean().item(), math.sqrt(2), rel_tol=1e-5)


# -- recurrence --------------------------------------------------------------------------------------------------------

N, STEPS, FEATURES, SIZE = 4, 9, 3, 5


def core_and_input(kind: str) -> tuple[RecurrentCore, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    core = RecurrentCore(kind, FEATURES, SIZE)
    return core, torch.randn(N, STEPS, FEATURES), torch.randn(N, core.state_size)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_without_episode_starts_a_sequence_is_torchs_own_layer(kind: str) -> None:
    core, features, state = core_and_input(kind)
    layer = (nn.LSTM if kind == "lstm" else nn.GRU)(FEATURES, SIZE, batch_first=True)
    layer.load_state_dict({f"{name}_l0": value for name, value in core.cell.state_dict().items()})
    first = tuple(part.contiguous().unsqueeze(0) for part in state.split(SIZE, -1))
    expected, _ = layer(features, first if kind == "lstm" else first[0])
    torch.testing.assert_close(core(features, torch.zeros(N, STEPS, dtype=torch.bool), state), expected)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_sequence_equals_single_steps_with_the_state_zeroed_at_episode_starts(kind: str) -> None:
    core, features, state = core_and_input(kind)
    starts = torch.rand(N, STEPS, generator=torch.Generator().manual_seed(2)) < 0.3
    starts[0, 0], starts[1, 0] = True, False
    assert starts.any(0).sum() > 2  # there is something to reset
    whole = core(features, starts, state)
    for t in range(STEPS):
        state = core.step(features[:, t], torch.where(starts[:, t, None], 0.0, state))
        torch.testing.assert_close(whole[:, t], state[:, :SIZE])


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_nothing_is_remembered_across_an_episode_start(kind: str) -> None:
    core, features, state = core_and_input(kind)
    starts = torch.zeros(N, STEPS, dtype=torch.bool)
    starts[:, 4] = True
    other = features.clone()
    other[:, :4] += 1.0
    one, two = core(features, starts, state), core(other, starts, state + 1.0)
    assert torch.equal(one[:, 4:], two[:, 4:])
    assert not torch.equal(one[:, :4], two[:, :4])


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_weights_start_orthogonal_without_bias(kind: str) -> None:
    core, _, _ = core_and_input(kind)
    for name, weight in core.cell.named_parameters():
        if "bias" in name:
            assert (weight == 0).all()
        else:
            torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5, rtol=0)
