"""A model's networks as a policy of Stable-Baselines3, for scripts that look into it or change its weights.

unidle's own policies act and learn. The copy is made when a script first reads `model.policy`, renewed when the model
has learned, and read back when the script has changed its weights.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from unidle.config.settings import Recipe
from unidle.errors import UsageError
from unidle.nn.mlp import ACTIVATIONS
from unidle.sb3.images import channels_first, is_image
from unidle.sb3.weights import Weights


class PolicyCopy:
    """A policy of Stable-Baselines3 and the weights that it was last given."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._given: Weights = {}

    def renew(self, weights: Weights) -> None:
        """Give it the model's weights."""
        try:
            self.policy.load_state_dict(weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UsageError(
                f"Stable-Baselines3's policy for these spaces has other layers ({reason}); use predict, get_parameters "
                "and set_parameters."
            ) from None
        self._given = {name: value.detach().cpu().clone() for name, value in self.policy.state_dict().items()}

    def changed(self) -> Weights | None:
        """Its weights, if the script has changed them since."""
        now = self.policy.state_dict()
        if all(torch.equal(value.cpu(), self._given[name]) for name, value in now.items()):
            return None
        self._given = {name: value.detach().cpu().clone() for name, value in now.items()}
        return dict(self._given)


def new_policy(
    algo: str,
    recipe: Recipe,
    observations: spaces.Space,
    actions: spaces.Space,
    device: torch.device,
    extractor: dict[str, Any],
) -> PolicyCopy:
    """An untrained policy; `extractor` are the features extractor's arguments in `policy_kwargs`."""
    try:
        classes: dict[str, Any] = getattr(import_module("stable_baselines3"), algo.upper()).policy_aliases
    except ImportError:
        raise UsageError(
            "A policy as a module is Stable-Baselines3's own; run: pip install stable-baselines3, or use predict, "
            "get_parameters and set_parameters."
        ) from None
    name = "MlpPolicy"
    if isinstance(observations, spaces.Dict):
        name = "MultiInputPolicy"
    elif is_image(observations):
        name = "CnnPolicy"
    observations = channels_first(observations)
    options: dict[str, Any] = {"net_arch": list(recipe.net_arch), "activation_fn": ACTIVATIONS[recipe.activation]}
    if algo != "dqn":
        critic = vars(recipe).get("critic_arch")
        both = list(recipe.net_arch), list(recipe.net_arch if critic is None else critic)
        options["net_arch"] = dict(zip(("pi", "vf" if algo == "ppo" else "qf"), both))
    if vars(recipe).get("use_sde"):
        options |= {"use_sde": True, "use_expln": vars(recipe)["use_expln"]}
    if algo in ("sac", "td3"):
        options["n_critics"] = vars(recipe)["n_critics"]
    with torch.random.fork_rng(devices=[]):  # its initial weights are replaced
        policy: nn.Module = classes[name](observations, actions, lambda _: recipe.learning_rate, **options, **extractor)
    policy.to(device).train(False)
    return PolicyCopy(policy)
