"""Arguments of Stable-Baselines3's constructors as unidle's settings, through the same mapping as its config files."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unidle.algos.schedules import Schedule
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.foreign.files import convert_sb3_arguments, sb3_values
from unidle.config.presets import load_preset
from unidle.errors import UsageError
from unidle.sb3.features import Extractor, take_extractor

SCHEDULED = ("learning_rate", "clip_range")
_POLICY_CLASSES = {
    **dict.fromkeys(("ActorCriticPolicy", "SACPolicy", "TD3Policy", "DQNPolicy"), "MlpPolicy"),
    "ActorCriticCnnPolicy": "CnnPolicy",
    "MultiInputActorCriticPolicy": "MultiInputPolicy",
}


@dataclass(frozen=True)
class Arguments:
    """What a model is created with."""

    config: Config
    notes: list[str]
    schedules: dict[str, Schedule]  # given as functions
    extractor: Extractor


def read_arguments(algo: str, given: Mapping[str, Any], n_envs: int, settings: Mapping[str, Any]) -> Arguments:
    """The arguments of a constructor; `settings` are unidle's own, which override them."""
    plain, schedules, extractor = _plain(algo, given)
    converted = convert_sb3_arguments(algo, plain, n_envs)
    assert converted.base_preset is not None
    base = load_preset(converted.base_preset).apply(Config())
    # Evaluations and best policies are for callbacks, as in Stable-Baselines3.
    own = {"n_envs": n_envs, "preset": converted.base_preset, "eval_every": 0, "save_replay_buffer": False}
    config = base.with_values({**converted.values, **own}, algo.upper()).with_values(dict(settings), "settings")
    return Arguments(config, converted.notes, schedules, extractor)


def changed_arguments(algo: str, given: Mapping[str, Any], config: Config) -> Arguments:
    """`config` with the arguments that `load` was given."""
    plain, schedules, extractor = _plain(algo, given)
    values, notes = sb3_values(algo, plain, config.recipe)
    return Arguments(config.with_values(values, algo.upper()), notes, schedules, extractor)


def _plain(algo: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Schedule], Extractor]:
    """The arguments as plain values, the schedules among them, and the features extractor."""
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
    extractor = take_extractor(options, policy)
    if options.get("net_arch", ()) is None:  # the default
        del options["net_arch"]
    if options.get("normalize_images") is True:  # unidle always does
        del options["normalize_images"]
    if options.get("share_features_extractor") is (algo == "ppo"):  # as unidle has it
        del options["share_features_extractor"]
    plain["policy_kwargs"] = {name: _without_classes(value) for name, value in options.items()}
    plain["device"] = _device(plain.get("device"))
    if plain.pop("action_noise", None) is not None:
        plain |= _action_noise(algo, given["action_noise"])
    if isinstance(plain.get("train_freq"), str):
        raise UsageError(f"{algo.upper()}: `train_freq` is {plain['train_freq']!r}; pass a number of steps.")
    if plain.get("replay_buffer_kwargs") == {"handle_timeout_termination": True}:  # unidle always does
        plain["replay_buffer_kwargs"] = None
    if plain.get("target_entropy") is not None and "target_entropy" in plain:
        plain["target_entropy"] = None if plain["target_entropy"] == "auto" else float(plain["target_entropy"])
    return plain, schedules, extractor


def _device(device: Any) -> str | None:
    """The device as text; the CPU where there is no GPU, as in Stable-Baselines3."""
    name = None if device is None else str(device)
    if name is not None and name.startswith("cuda") and not torch.cuda.is_available():
        warnings.warn("There is no GPU that torch can use; the model is on the CPU.", stacklevel=2)
        return "cpu"
    return name


def _policy_name(policy: Any) -> str:
    """The name of a policy; Stable-Baselines3's own classes have names besides those that it knows them by."""
    if isinstance(policy, type) and policy.__module__.startswith("stable_baselines3."):
        return _POLICY_CLASSES.get(policy.__name__, policy.__name__)
    return policy.__name__ if isinstance(policy, type) else str(policy)


def _is_constant(schedule: Any) -> bool:
    return callable(schedule) and schedule(1.0) == schedule(0.5) == schedule(0.0)


def seed_of(seed: int | None) -> int:
    """The seed, or a random one."""
    return secrets.randbelow(2**31) if seed is None else int(seed)


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
    is_none = type(noise).__name__ == "NormalActionNoise" and not np.any(noise._mu) and not np.any(noise._sigma)
    if is_none:
        return {}
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
