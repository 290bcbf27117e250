"""The optimiser that a recipe asks for."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from unidle.config import Recipe
from unidle.nn.optim.adam import FlatAdam
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.nn.optim.gradient_descent import FlatRMSprop, FlatSGD


class Optimiser(Protocol):
    """Steps flat parameters [member, parameter] along their gradient, both changed only in place."""

    def step(self, skip: Tensor | None = None) -> None:
        """One step, except for members whose `skip` [member] is 1; `skip` is only read on the device."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores, as the tensors that a step changes."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a checkpoint's values into the existing tensors."""


def new_optimiser(recipe: Recipe, parameters: FlatParameters, learning_rate: Tensor) -> Optimiser:
    """An optimiser of `parameters` with learning rates [member]."""
    tensors, decay = (parameters.flat, parameters.grad, learning_rate), recipe.weight_decay_factor
    if recipe.optimizer == "sgd":
        return FlatSGD(*tensors, recipe.momentum, decay)
    if recipe.optimizer == "rmsprop":
        return FlatRMSprop(*tensors, recipe.adam_eps, recipe.rmsprop_alpha, recipe.momentum, decay)
    beta1, beta2 = recipe.adam_betas
    return FlatAdam(*tensors, recipe.adam_eps, (beta1, beta2), decay, decoupled=recipe.optimizer == "adamw")


def fused_step_unsupported(recipe: Recipe) -> str | None:
    """Why kernels that fuse the step do not support the recipe's optimiser; None if they do."""
    if recipe.optimizer not in ("adam", "adamw"):
        return f"the optimiser is {recipe.optimizer}: kernels take adam"
    if recipe.weight_decay_factor:
        return "the weight decay is not 0: kernels take none"
    if 0.0 in recipe.adam_betas:  # kernels use their logarithms
        return "one of adam_betas is 0"
    return None
