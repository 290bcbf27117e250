"""Converts settings of Stable-Baselines3, rl-zoo and Isaac Lab to unidle's."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable
from typing import Any

from unidle.config.fields import coerce, section_of
from unidle.config.settings import Activation
from unidle.errors import UsageError

# Takes a value and the name of its file, adds to the notes, and returns flat unidle values.
Reader = Callable[[Any, str, list[str]], dict[str, Any]]

RENAMED = {
    "n_timesteps": "timesteps",
    "normalize_input": "normalize_obs",
    "normalize_value": "normalize_reward",  # Isaac Lab passes it as VecNormalize's norm_reward
}

# Settings that unidle does not have, with the value that has no effect and needs no message.
_WITHOUT_EFFECT: dict[str, Any] = {
    "use_sde": False,
    "sde_sample_freq": -1,
    "frame_stack": 1,
    "verbose": 0,
    "ortho_init": True,
    "squash_output": False,
    "share_features_extractor": True,
    "n_lstm_layers": 1,
}


def leave_out(word: str, value: Any, notes: list[str], inside: str = "") -> None:
    """Add a message about a setting that unidle does not have, unless its value has no effect."""
    if word not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[word] != value:
        notes.append(f"`{inside}{word}` has no equivalent in unidle and is ignored.")


def is_linear(value: Any) -> bool:
    """Whether it is rl-zoo's linear schedule: `lin_3e-4` anneals from 3e-4 to 0 over the run."""
    return isinstance(value, str) and value.startswith("lin_")


def _policy(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    if value == "MlpPolicy":  # what unidle builds anyway
        return {}
    if str(value).endswith("LstmPolicy"):
        notes.append(f"`policy: {value}` becomes `recurrent: lstm`.")
        return {"recurrent": "lstm"}
    notes.append(f"`policy: {value}` is ignored; unidle chooses the network from the observation space.")
    return {}


def _learning_rate(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    if is_linear(value):
        return {"learning_rate": value.removeprefix("lin_"), "lr_schedule": "linear"}
    return {"learning_rate": value}


def _clip_range(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    if is_linear(value):
        return {"clip_range": value.removeprefix("lin_"), "clip_schedule": "linear"}
    return {"clip_range": value}


def _clip_range_vf(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    if is_linear(value):
        value = value.removeprefix("lin_")
        notes.append(f"`clip_range_vf` stays constant at {value}; unidle has no schedule for it.")
    clip_range = coerce("clip_range_vf", value, source)
    # In rl-zoo, a negative number means no clipping.
    return {"clip_range_vf": None if clip_range is not None and clip_range < 0 else clip_range}


def _seed(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    return {} if value is None else {"seed": value}  # unidle always has a seed


def _device(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    kind, _, index = str(value).partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        notes.append(f"`device: {value}` is not supported and is ignored.")
        return {}
    if index not in ("", "0"):
        notes.append(f"`device: {value}` becomes {kind}; choose the GPU with CUDA_VISIBLE_DEVICES={index}.")
    return {"device": kind}


def _normalize(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    """VecNormalize: true for both observations and rewards, or its arguments."""
    options = _plain("normalize", value, source)
    if isinstance(options, bool):
        options = {"norm_obs": options, "norm_reward": options}
    if not isinstance(options, dict):
        raise UsageError(
            f"{source}: `normalize` must be true, false or dict(norm_obs=…, norm_reward=…), not {value!r}."
        )
    for name in options.keys() - {"norm_obs", "norm_reward"}:
        leave_out(str(name), options[name], notes, "normalize.")
    return {
        "normalize_obs": options.get("norm_obs", True),
        "normalize_reward": options.get("norm_reward", True),
    }


def _env_kwargs(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    return {"env_kwargs": _plain("env_kwargs", value, source)}


def _policy_kwargs(value: Any, source: str, notes: list[str]) -> dict[str, Any]:
    options = _plain("policy_kwargs", value, source)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise UsageError(f"{source}: `policy_kwargs` must be a mapping or dict(…), not {value!r}.")
    values: dict[str, Any] = {}
    for name, option in options.items():
        if name == "net_arch":
            values["net_arch"] = _net_arch(option, notes)
        elif name == "activation_fn":
            values |= _activation_fn(option, notes)
        elif name == "lstm_hidden_size":
            values["recurrent_size"] = option
        elif name == "log_std_init":
            values["log_std_init"] = option
            notes.append(
                "`log_std_init` is in action units in SB3, but in units of half the action range in unidle; "
                "they are equal for actions in [-1, 1]."
            )
        else:
            leave_out(str(name), option, notes, "policy_kwargs.")
    return values


def _net_arch(value: Any, notes: list[str]) -> Any:
    """The actor's layers in [64, 64], {pi: […], vf: […]} or the old [shared…, {pi: […], vf: […]}]."""
    layers = value if isinstance(value, list) else [value]
    if not layers or not isinstance(layers[-1], dict):
        return value
    shared, heads = layers[:-1], layers[-1]
    actor, critic = heads.get("pi", []), heads.get("vf", [])
    if actor != critic:
        notes.append(f"`net_arch` is {actor} for the actor and {critic} for the critic; unidle uses {actor} for both.")
    for name in heads.keys() - {"pi", "vf"}:
        leave_out(str(name), heads[name], notes, "net_arch.")
    if not shared:
        return actor
    notes.append(f"`net_arch` shares layers {shared}; unidle uses separate ones for actor and critic.")
    return [*shared, *actor] if isinstance(actor, list) else actor


def _activation_fn(value: Any, notes: list[str]) -> dict[str, Any]:
    name = str(value).rpartition(".")[2].lower()  # nn.ReLU, torch.nn.ReLU, relu
    known = typing.get_args(Activation)
    if name in known:
        return {"activation": name}
    notes.append(f"`activation_fn: {value}` is ignored; unidle has {', '.join(known)}.")
    return {}


READERS: dict[str, Reader] = {
    "policy": _policy,
    "learning_rate": _learning_rate,
    "clip_range": _clip_range,
    "clip_range_vf": _clip_range_vf,
    "seed": _seed,
    "device": _device,
    "normalize": _normalize,
    "env_kwargs": _env_kwargs,
    "policy_kwargs": _policy_kwargs,
}


# Names that identify such a file.
MARKS = {
    *RENAMED,
    *(word for word in READERS if not section_of(word)),
    "n_minibatches",
    "use_sde",
}


def _plain(word: str, value: Any, source: str) -> Any:
    """`value`, evaluated if it is Python text such as "dict(net_arch=[64, 64])"."""
    if not isinstance(value, str):
        return value
    try:
        return _value_of(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise UsageError(
            f"{source}: `{word}` contains Python code, which unidle does not run; "
            "write plain values, such as dict(net_arch=[64, 64])."
        ) from None


def _value_of(node: ast.expr | None) -> Any:
    """The value of a literal or dict(…), names as strings; ValueError for anything that would execute code."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_value_of(key): _value_of(value) for key, value in zip(keys, values)}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs) if all(pair.arg for pair in pairs):
            return {pair.arg: _value_of(pair.value) for pair in pairs}
        case ast.Name() | ast.Attribute(value=ast.Name() | ast.Attribute()):
            return ast.unparse(node)  # nn.ReLU
    raise ValueError("not plain values")
