"""Checks for NaN and infinite values in rollouts, metrics and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.config import Recipe
from unidle.errors import DivergedError
from unidle.nn.encoder import Encoder


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinite value: step `step` of environment `env` returned it, in this iteration."""

    iteration: int
    step: int
    env: int
    is_reward: bool

    def message(self, recipe: Recipe) -> str:
        """The environment and the step that returned it, as text."""
        what = "reward" if self.is_reward else "observation"
        at = self.iteration * recipe.total_batch + self.step * recipe.n_envs
        return f"Environment {self.env} returned a NaN or infinite {what} near step {at}"


def all_finite(encoder: Encoder, rollout: Rollout) -> Tensor:
    """[T, N] whether every value that a step returned is finite."""
    finite = encoder.all_finite(rollout.obs[1:])
    if rollout.rewards.is_cpu:  # torch takes several times as long for a few numbers
        finite &= torch.from_numpy(np.isfinite(rollout.rewards.numpy()))
    else:
        finite &= torch.isfinite(rollout.rewards)
    if not len(rollout.final_at):
        return finite
    # Where an episode was truncated, the step returned its true final observation, not the one in `obs`.
    finite = torch.nn.functional.pad(finite.view(-1), (0, 1))
    finite[rollout.final_at] &= encoder.all_finite(rollout.final_obs)
    return finite[:-1].view(rollout.shape)


def first_non_finite(finite: Tensor, rollout: Rollout, iteration: int) -> NonFinite:
    """The first step that is not finite according to `all_finite`; waits for the device."""
    step, env = (int(i) for i in torch.nonzero(~finite)[0])
    return NonFinite(iteration, step, env, not bool(torch.isfinite(rollout.rewards[step, env])))


def require_finite(
    non_finite: NonFinite | None, metrics: dict[str, float], step: int, recipe: Recipe, checkpoints: Path | None
) -> None:
    """DivergedError if an environment returned a NaN or infinite value, or the update at `step` has led to one."""
    kept = "" if checkpoints is None else f"; the last good checkpoint is kept in {checkpoints}"
    if non_finite is not None:
        raise DivergedError(f"{non_finite.message(recipe)}{kept}.")
    what = _diverged(metrics)
    if what is None:
        return
    normalise = ", or normalise observations and rewards (--normalize-obs --normalize-reward)"
    remedy = f"Lower the learning rate{normalise if recipe.on_policy else ''}."
    raise DivergedError(f"Learning diverged: {what} is NaN or infinite at step {step}{kept}. {remedy}")


def _diverged(metrics: dict[str, float]) -> str | None:
    """The names of metrics that are NaN or infinite after an update, or "a weight"; None if everything is finite."""
    names = [name for name, value in metrics.items() if not math.isfinite(value) and name != "explained_variance"]
    if names or not metrics["weights_finite"]:
        return ", ".join(names) or "a weight"
    return None
