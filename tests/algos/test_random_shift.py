"""Random shifts of sampled images, against the formula pixel by pixel, and in runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from image_envs import RandomImages
from resumed_runs import StopAfter, assert_same, final_state
from torch import Tensor

import unidle
from unidle.algos.random_shift import RandomShift, shift_images
from unidle.buffers.replay import Transitions
from unidle.errors import UsageError
from unidle.nn.encoder import leaf_tensor
from unidle.spaces.observations import ObservationLayout


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def random_batch(layout: ObservationLayout, size: int) -> Transitions:
    obs = torch.randint(
        0, 256, (2, size, layout.obs_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    zeros = torch.zeros(size)
    return Transitions(obs[0], zeros.unsqueeze(1), zeros, zeros, obs[1], zeros.long(), zeros + 1)


@pytest.mark.parametrize("shape", [(9, 12), (9, 12, 3), (3, 9, 12)])
def test_every_pixel_comes_from_the_shifted_place_or_the_border(shape: tuple[int, ...]) -> None:
    (leaf,) = ObservationLayout.of(image(*shape)).leaves
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    down, right = torch.tensor([0, -4, 3, 1, 4]), torch.tensor([0, 2, -4, 4, -1])
    shifted = shift_images(images, leaf, down, right)
    height_axis = 2 if shape[0] == 3 else 1

    def pixel(batch: Tensor, number: int, y: int, x: int) -> Tensor:
        return batch[number].select(height_axis - 1, y).select(height_axis - 1, x)

    for number in range(5):
        for y in range(9):
            for x in range(12):
                source = min(max(y + int(down[number]), 0), 8), min(max(x + int(right[number]), 0), 11)
                assert torch.equal(pixel(shifted, number, y, x), pixel(images, number, *source))


def test_shift_is_a_crop_of_the_padded_image() -> None:
    """DrQ's own words: pad by repeating the border, then crop at random."""
    (leaf,) = ObservationLayout.of(image(4, 20, 20)).leaves
    images = torch.randint(0, 256, (3, 4, 20, 20), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images.float(), (4, 4, 4, 4), mode="replicate").to(torch.uint8)
    down, right = torch.tensor([-4, 0, 3]), torch.tensor([4, -2, 1])
    shifted = shift_images(images, leaf, down, right)
    for number, (y, x) in enumerate(zip(down + 4, right + 4)):
        assert torch.equal(shifted[number], padded[number, :, y : y + 20, x : x + 20])


def test_offsets_are_uniform_and_differ_between_samples_and_observations() -> None:
    layout, size, n = ObservationLayout.of(image(16, 16)), 4000, 2
    ramp = torch.arange(16, dtype=torch.uint8)
    obs = (16 * ramp.unsqueeze(1) + ramp).flatten().expand(size, -1).contiguous()  # the middle pixel tells the shift
    batch = random_batch(layout, size)
    batch.obs.copy_(obs)
    batch.next_obs.copy_(obs)
    shifted = RandomShift(layout, n)(batch, torch.Generator().manual_seed(0))
    middle = 16 * 8 + 8
    seen = torch.stack(
        [leaf_tensor(each, layout.leaves[0]).flatten(1)[:, middle] for each in (shifted.obs, shifted.next_obs)]
    )
    down, right = seen // 16 - 8.0, seen % 16 - 8.0
    for offsets in (down[0], right[0], down[1], right[1]):
        values, counts = offsets.unique(return_counts=True)
        assert values.tolist() == [-2, -1, 0, 1, 2]
        assert (counts - size / 5).abs().max() < 5 * (size * 0.16) ** 0.5  # 5 standard deviations
    pairs = torch.stack((down[0], right[0], down[1], right[1])).unique(dim=1)
    assert pairs.shape[1] == 5**4  # every combination: they are independent


def test_rest_of_observation_and_batch_is_unchanged() -> None:
    space = spaces.Dict(
        left=image(8, 8, 3), right=image(8, 10), speed=spaces.Box(-1, 1, (3,)), mask=spaces.MultiBinary(3)
    )
    layout = ObservationLayout.of(space)
    batch = random_batch(layout, 50)
    before = batch.obs.clone()
    shifted = RandomShift(layout, 3)(batch, torch.Generator().manual_seed(1))
    assert torch.equal(batch.obs, before)
    for leaf in layout.leaves:
        ours, theirs = (leaf_tensor(obs, leaf).view(torch.uint8) for obs in (shifted.obs, batch.obs))
        assert torch.equal(ours, theirs) != leaf.is_image
    for name in ("actions", "returns", "discounts", "index", "weights"):
        assert getattr(shifted, name) is getattr(batch, name)


SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 4,
    "batch_size": 8,
    "net_arch": (8,),
    "buffer_size": 60,
    "learning_starts": 24,
    "utd_ratio": 0.5,
    "timesteps": 96,
    "eval_every": 0,
    "subproc": False,
    "tensorboard": False,
    "device": "cpu",
    "seed": 5,
    "quiet": True,
}


@pytest.mark.parametrize("algo", ["sac", "td3", "dqn"])
def test_resumed_run_with_shifts_equals_uninterrupted_run(algo: str, tmp_path: Path) -> None:
    env = partial(RandomImages, (10, 9, 3), continuous=algo != "dqn")
    settings = {**SMALL, "algo": algo, "preset": algo, "runs_dir": str(tmp_path), "random_shift": 4}
    uninterrupted = unidle.train(env, run_name="uninterrupted", **settings)
    unidle.train(env, run_name="resumed", after_iteration=[StopAfter(7)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", env=env, quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))
    unshifted = unidle.train(env, run_name="unshifted", **{**settings, "random_shift": 0})
    weights = [final_state(run.path)["algo"]["policy"] for run in (uninterrupted, unshifted)]
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("settings", "env", "message"),
    [
        ({"algo": "dqn", "random_shift": 4}, "CartPole-v1", "`random_shift` is for images"),
        ({"algo": "dqn", "random_shift": 9}, RandomImages, "only 10 × 9"),
        ({"algo": "dqn", "random_shift": -1}, RandomImages, "must not be negative"),
    ],
    ids=["no images", "too large", "negative"],
)
def test_shift_without_effect_is_refused(settings: dict[str, Any], env: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(env, **{**SMALL, **settings}, runs_dir=str(tmp_path))


def test_ppo_has_no_random_shift(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="random_shift"):
        unidle.train("CartPole-v1", algo="ppo", random_shift=4, runs_dir=str(tmp_path), quiet=True)
