"""Arguments of Stable-Baselines3's constructors as unidle's settings, through the same mapping as its config files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from unidle.algos.schedules import Schedule
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.foreign.files import convert_sb3_arguments, sb3_values
from unidle.config.presets import load_preset
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory

SCHEDULED = ("learning_rate", "clip_range")
_POLICY_CLASSES = {
    **dict.fromkeys(("ActorCriticPolicy", "SACPolicy", "TD3Policy", "DQNPolicy"), "MlpPolicy"),
    "ActorCriticCnnPolicy": "CnnPolicy",
    "MultiInputActorCriticPolicy": "MultiInputPolicy",
}
_EXTRACTOR = ("features_extractor_class", "features_extractor_kwargs")


@dataclass(frozen=True)
class Arguments:
    """What a model is created with."""

    config: Config
    notes: list[str]
    schedules: dict[str, Schedule]  # given as functions
    network: NetworkFactory | None


def read_arguments(algo: str, given: Mapping[str, Any], n_envs: int, settings: Mapping[str, Any]) -> Arguments:
    """The arguments of a constructor; `settings` are unidle's own, which override them."""
    plain, schedules, network = _plain(algo, given)
    converted = convert_sb3_arguments(algo, plain, n_envs)
    assert converted.base_preset is not None
    base = load_preset(converted.base_preset).apply(Config())
    # Evaluations and best policies are for callbacks, as in Stable-Baselines3.
    own = {"n_envs": n_envs, "preset": converted.base_preset, "eval_every": 0, "save_replay_buffer": False}
    config = base.with_values({**converted.values, **own}, algo.upper()).with_values(dict(settings), "settings")
    return Arguments(config, converted.notes, schedules, network)


def changed_arguments(algo: str, given: Mapping[str, Any], config: Config) -> Arguments:
    """`config` with the arguments that `load` was given."""
    plain, schedules, network = _plain(algo, given)
    values, notes = sb3_values(algo, plain, config.recipe)
    return Arguments(config.with_values(values, algo.upper()), notes, schedules, network)


def _plain(algo: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Schedule], NetworkFactory | None]:
    """The arguments as plain values, the schedules among them, and the network."""
    plain, schedules = dict(given), {}
    for name in SCHEDULED:
        if callable(plain.get(name)):
            schedules[name] = _checked(name, plain[name], algo)
            plain[name] = schedules[name](1.0)
    if _is_constant(plain.get("clip_range_vf")):  # as rl-zoo passes it
        plain["clip_range_vf"] = plain["clip_range_vf"](1.0)
    if callable(plain.get("clip_range_vf")):
        raise UsageError(f"{algo.upper()}: `clip_range_vf` is a function, but unidle keeps it constant; pass a number.")
    policy = None
    if plain.get("policy") is not None:
        policy = plain["policy"] = _policy_name(plain["policy"])
    is_named = policy in (None, "MlpPolicy", "CnnPolicy", "MultiInputPolicy") or str(policy).endswith("LstmPolicy")
    if not is_named:
        raise UsageError(
            f"{algo.upper()}: the policy {policy} is not supported; pass 'MlpPolicy', 'CnnPolicy' or "
            "'MultiInputPolicy', and your network as policy_kwargs['features_extractor_class']."
        )
    options = dict(plain.get("policy_kwargs") or {})
    network = _network(options)
    if options.get("net_arch", ()) is None:  # the default
        del options["net_arch"]
    if options.get("normalize_images") is True:  # unidle always does
        del options["normalize_images"]
    plain["policy_kwargs"] = {name: _without_classes(value) for name, value in options.items()}
    if isinstance(plain.get("device"), torch.device):
        plain["device"] = str(plain["device"])
    if plain.pop("action_noise", None) is not None:
        plain |= _action_noise(algo, given["action_noise"])
    if plain.get("target_entropy") is not None and "target_entropy" in plain:
        plain["target_entropy"] = None if plain["target_entropy"] == "auto" else float(plain["target_entropy"])
    return plain, schedules, network


def _policy_name(policy: Any) -> str:
    """The name of a policy; Stable-Baselines3's own classes have names besides those that it knows them by."""
    if isinstance(policy, type) and policy.__module__.startswith("stable_baselines3."):
        return _POLICY_CLASSES.get(policy.__name__, policy.__name__)
    return policy.__name__ if isinstance(policy, type) else str(policy)


def _is_constant(schedule: Any) -> bool:
    return callable(schedule) and schedule(1.0) == schedule(0.5) == schedule(0.0)


def first_value(given: Any) -> Any:
    """The value at the start of training: of a schedule, or the given value itself."""
    return given(1.0) if callable(given) else given


def is_above_zero(value: Any) -> bool:
    """Whether it is a number above 0, as learning rates and clip ranges must be."""
    return isinstance(value, int | float | np.number) and bool(value > 0)


def _checked(name: str, schedule: Any, algo: str) -> Schedule:
    """A schedule whose values are numbers above 0, except at the end."""
    start = first_value(schedule)
    if not is_above_zero(start):
        raise UsageError(
            f"{algo.upper()}: `{name}` returns {in_brief(start)} for 1.0, the start of training; it must return a "
            "number above 0."
        )
    return lambda remaining: float(schedule(remaining))


def _without_classes(value: Any) -> Any:
    """Classes by their name, tuples as lists."""
    if isinstance(value, type):
        return value.__name__
    return list(value) if isinstance(value, tuple) else value


def _action_noise(algo: str, noise: Any) -> dict[str, Any]:
    if algo != "td3":
        raise UsageError(
            f"{algo.upper()}: `action_noise` needs TD3; {algo.upper()} explores by sampling its actions. Leave it out."
        )
    deviations = {float(each) for each in np.ravel(getattr(noise, "_sigma", ()))}
    if type(noise).__name__ != "NormalActionNoise" or np.any(getattr(noise, "_mu", 0)) or len(deviations) != 1:
        raise UsageError(
            f"{algo.upper()}: `action_noise` {type(noise).__name__} is not supported; use NormalActionNoise with mean "
            "0 and the same sigma for all actions."
        )
    return {"noise_type": "normal", "noise_std": deviations.pop()}


# -- features extractors -----------------------------------------------------------------------------------------------


def _network(options: dict[str, Any]) -> NetworkFactory | None:
    """Take the features extractor out of `policy_kwargs`."""
    kind, kwargs = (options.pop(name, None) for name in _EXTRACTOR)
    if kind is None or kind.__name__ in ("FlattenExtractor", "NatureCNN", "CombinedExtractor"):  # unidle's own do that
        return None
    return lambda observations, actions: _Extractor(kind(observations, **(kwargs or {})), observations)


_CHANGING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


class _Extractor(nn.Module):
    """A features extractor of Stable-Baselines3, with the observations that it expects."""

    def __init__(self, module: nn.Module, space: spaces.Space) -> None:
        super().__init__()
        changing = [type(layer).__name__ for layer in module.modules() if isinstance(layer, _CHANGING)]
        if changing:
            raise UsageError(
                f"The features extractor has a {changing[0]}, which is another function while learning than while "
                "acting, but unidle has one for both; leave it out, or use LayerNorm."
            )
        self.module, self._space = module, space

    def forward(self, observation: Any) -> torch.Tensor:
        """Prepare the observation, and extract features."""
        features: torch.Tensor = self.module(_prepared(observation, self._space))
        return features


def _prepared(observation: Any, space: spaces.Space) -> Any:
    """Floats: images from 0 to 1, categories one-hot."""
    if isinstance(space, spaces.Dict):
        return {key: _prepared(observation[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return nn.functional.one_hot(observation.long().flatten() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        raise UsageError("A features extractor gets Box, Discrete and MultiBinary observations; flatten yours.")
    is_image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
    return observation.float() / 255.0 if is_image else observation.float()
