"""Encoders: packed observations to features, and custom networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.errors import UsageError
from unidle.nn.encoder import CustomEncoder, Encoder
from unidle.spaces.observations import ObservationLayout

BODY = spaces.Dict(
    {
        "speed": spaces.Box(-9, 9, (2,), np.float64),
        "gear": spaces.Discrete(3, start=-1),
        "lamps": spaces.MultiBinary([2, 1]),
        "dials": spaces.MultiDiscrete([[2, 3]], start=[[5, 0]]),
        "count": spaces.Box(0, 1000, (1, 1), np.int16),
    }
)
OBSERVATION = {
    "speed": np.array([0.5, -2.0]),
    "gear": 1,
    "lamps": np.array([[1], [0]], np.int8),
    "dials": np.array([[6, 0]]),
    "count": np.array([[300]], np.int16),
}


def packed(layout: ObservationLayout, *observations: Any) -> Tensor:
    return torch.from_numpy(np.stack([layout.pack(observation) for observation in observations]))


def test_numbers_pass_through_and_categories_become_one_hot() -> None:
    layout = ObservationLayout.of(BODY)
    encoder = Encoder(layout, normalize=False)
    features = encoder(packed(layout, OBSERVATION))
    count_and_speed, lamps = [300.0, 0.5, -2.0], [1.0, 0.0]
    dials, gear = [0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    assert features.tolist() == [count_and_speed + lamps + dials + gear]
    assert encoder.n_features == features.shape[1] == 13


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, ()),
        spaces.Box(-1, 1, (2, 3)),
        spaces.Box(0, 255, (9, 9, 3), np.uint8),
        spaces.Tuple((spaces.Box(0, 255, (9, 9), np.uint8), spaces.Box(0, 255, (2,), np.uint8))),
        BODY,
    ],
)
def test_features_of_each_space_have_announced_size(space: spaces.Space) -> None:
    layout = ObservationLayout.of(space)
    encoder = Encoder(layout, normalize=False)
    space.seed(0)
    obs = packed(layout, *(space.sample() for _ in range(6)))
    features = encoder(obs)
    assert features.dtype == torch.float32
    assert features.shape == (6, encoder.n_features)
    assert torch.allclose(encoder(obs.view(2, 3, -1)).view(6, -1), features, atol=1e-6)


def test_normalised_features_are_standardised_and_clipped_at_10() -> None:
    layout = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (2,)))
    encoder = Encoder(layout, normalize=True)
    rng = np.random.default_rng(0)
    seen = rng.normal([5.0, -1.0], [2.0, 0.1], (500, 2)).astype(np.float32)
    encoder.update_norm(packed(layout, *seen).view(50, 10, -1))
    features = encoder(packed(layout, *seen))
    torch.testing.assert_close(features.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(0, unbiased=False), torch.ones(2), atol=1e-4, rtol=0)
    far = encoder(packed(layout, np.array([1e6, -1e6], np.float32)))
    assert far.tolist() == [[10.0, -10.0]]


def test_images_categories_and_bits_are_not_normalised() -> None:
    space = spaces.Tuple((spaces.Box(0, 255, (9, 9), np.uint8), spaces.Discrete(3), spaces.MultiBinary(2)))
    layout = ObservationLayout.of(space)
    encoder = Encoder(layout, normalize=True)
    obs = packed(layout, *(space.sample() for _ in range(5)))
    before = encoder(obs)
    encoder.update_norm(obs)
    assert encoder.norm is None
    assert torch.equal(encoder(obs), before)


def test_all_finite_finds_nan_and_infinity() -> None:
    layout = ObservationLayout.of(spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(2)}))
    encoder = Encoder(layout, normalize=False)
    values = [[0.0, 1.0], [np.nan, 0.0], [0.0, np.inf]]
    obs = packed(layout, *({"a": np.array(value, np.float32), "b": 1} for value in values))
    assert encoder.all_finite(obs).tolist() == [True, False, False]


def test_empty_batch_can_be_encoded_and_checked() -> None:
    layout = ObservationLayout.of(BODY)
    encoder = Encoder(layout, normalize=False)
    empty_batch = torch.from_numpy(np.concatenate([np.zeros((3, layout.obs_bytes), np.uint8)[:0]]))  # strides of 0
    assert encoder(empty_batch).shape == (0, encoder.n_features)
    assert encoder.all_finite(empty_batch).shape == (0,)


def test_categories_are_always_finite() -> None:
    layout = ObservationLayout.of(spaces.Discrete(3))
    assert Encoder(layout, normalize=False).all_finite(packed(layout, 0, 2)).tolist() == [True, True]


# -- many categories ---------------------------------------------------------------------------------------------------


def test_components_with_many_categories_are_embedded() -> None:
    layout = ObservationLayout.of(spaces.Tuple((spaces.MultiDiscrete([3, 5000], start=[0, -2]), spaces.Discrete(4097))))
    encoder = Encoder(layout, normalize=False)
    assert encoder.n_features == 3 + 64 + 64
    (first, second), obs = (
        encoder.categories.tables,
        packed(layout, (np.array([1, -2]), 7), (np.array([2, 4997]), 4096)),
    )
    assert (first.weight.shape, second.weight.shape) == ((5000, 64), (4097, 64))
    features = encoder(obs)
    assert features[:, :3].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert torch.equal(features[:, 3:67], first.weight[[0, 4999]])
    assert torch.equal(features[:, 67:], second.weight[[7, 4096]])
    features.sum().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 4999]


def test_up_to_4096_categories_are_one_hot() -> None:
    encoder = Encoder(ObservationLayout.of(spaces.Discrete(4096)), normalize=False)
    assert encoder.n_features == 4096
    assert not list(encoder.parameters())


def test_too_many_categories_are_refused() -> None:
    layout = ObservationLayout.of(spaces.Dict(at=spaces.Discrete(2**40)))
    with pytest.raises(UsageError) as error:
        Encoder(layout, normalize=False)
    assert str(error.value) == (
        "observation['at'] has 1,099,511,627,776 categories, too many to learn from (at most 1,000,000); wrap the "
        "environment (--wrapper module:callable) so that it is a Box or several smaller components."
    )


# -- custom networks ---------------------------------------------------------------------------------------------------


class SpeedAndGear(nn.Module):
    """Keeps its input; returns speed and gear concatenated."""

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        self.seen = observation
        return torch.cat([observation["speed"], observation["gear"].float().unsqueeze(-1)], -1)


def test_custom_network_gets_space_structure_in_one_batch() -> None:
    layout = ObservationLayout.of(BODY)
    module = SpeedAndGear()
    encoder = CustomEncoder(layout, normalize=False, module=module)
    features = encoder(packed(layout, *[OBSERVATION] * 6).view(2, 3, -1))
    assert encoder.n_features == 3
    assert features.tolist() == [[[0.5, -2.0, 1.0]] * 3] * 2
    assert {key: tuple(value.shape) for key, value in module.seen.items()} == {
        "speed": (6, 2),
        "gear": (6,),
        "lamps": (6, 2, 1),
        "dials": (6, 1, 2),
        "count": (6, 1, 1),
    }


def test_custom_network_does_not_see_action_mask_key() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "speed": spaces.Box(-1, 1, (2,)), "gear": BODY["gear"]})
    module = SpeedAndGear()
    CustomEncoder(ObservationLayout.of(space, mask_width=2), normalize=False, module=module)
    assert set(module.seen) == {"speed", "gear"}


def test_custom_network_gets_tuples_as_tuples() -> None:
    class Sum(nn.Module):
        def forward(self, observation: tuple[Tensor, ...]) -> Tensor:
            first, second = observation
            return first + second

    layout = ObservationLayout.of(spaces.Tuple((spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (3,)))))
    encoder = CustomEncoder(layout, normalize=False, module=Sum())
    ones = np.ones(3, np.float32)
    assert encoder(packed(layout, (ones, ones))).tolist() == [[2.0, 2.0, 2.0]]


class Returns(nn.Module):
    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self._shape = shape

    def forward(self, observation: Tensor) -> Any:
        return None if self._shape is None else torch.zeros(self._shape)


@pytest.mark.parametrize("shape", [None, (2,), (6,), (2, 3, 4), (1, 3), (4, 3)])
def test_custom_network_must_return_batch_of_features(shape: tuple[int, ...] | None) -> None:
    with pytest.raises(UsageError, match=r"^Your network must map a batch of observations to a \[batch, features\] "):
        CustomEncoder(ObservationLayout.of(spaces.Box(-1, 1, (3,))), normalize=False, module=Returns(shape))


def test_custom_network_with_normalize_obs_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"^normalize_obs does not apply to a custom network"):
        CustomEncoder(ObservationLayout.of(spaces.Box(-1, 1, (3,))), normalize=True, module=Returns((2, 3)))
