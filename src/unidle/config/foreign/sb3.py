"""Converts settings of Stable-Baselines3, rl-zoo and Isaac Lab to unidle's."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable
from typing import Any

from unidle.config.fields import coerce, owners_of, section_of
from unidle.config.foreign import sb3_off_policy, sb3_optimizer, sb3_sde
from unidle.config.settings import Activation
from unidle.errors import UsageError

# Takes a value, the name of its file, notes to add to, and the algorithm; returns flat unidle values.
Reader = Callable[[Any, str, list[str], str], dict[str, Any]]

RENAMED = {
    "n_timesteps": "timesteps",
    "normalize_input": "normalize_obs",
    "normalize_value": "normalize_reward",  # Isaac Lab passes it as VecNormalize's norm_reward
}

# Settings that unidle does not have, with the values that have no effect.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "vec_env_wrapper": (None, []),
    "callback": (None, []),
    "ortho_init": (True,),
    "squash_output": (False,),
    "full_std": (True,),
    "clip_mean": (2.0,),
    "share_features_extractor": (True,),
    "shared_lstm": (True,),
    "n_lstm_layers": (1,),
    "exploration_initial_eps": (1.0,),
    "replay_buffer_class": (None, "ReplayBuffer"),
    "replay_buffer_kwargs": (None, {}, "dict()"),
    "clip_obs": (10.0,),
    "clip_reward": (10.0,),
    "rollout_buffer_class": (None,),
    "rollout_buffer_kwargs": (None, {}),
}
# Settings that do not affect learning: printing, logging, and where data is stored.
_NOT_LEARNING = {
    *("verbose", "tensorboard_log", "stats_window_size", "log_interval", "progress_bar", "monitor_kwargs"),
    *("optimize_memory_usage", "vec_env_class", "vec_env_kwargs"),
}
_REASONS = {
    "squash_output": "with gSDE, unidle's PPO clips actions",
    "full_std": "unidle's gSDE learns a standard deviation for each feature and action",
    "clip_mean": "unidle's SAC keeps the mean of gSDE's actions in ±2",
    "vec_env_wrapper": "unidle wraps single environments, with --wrapper",
    "callback": "pass callbacks in Python, as after_iteration and after_evaluation",
    "ortho_init": "only PPO's initial weights are orthogonal",
    "replay_buffer_class": "unidle has uniform and prioritised replay (`per`), and no hindsight replay (HER)",
    "replay_buffer_kwargs": "unidle's replay buffer has none of these",
    "rollout_buffer_class": "unidle has one rollout buffer",
    "rollout_buffer_kwargs": "unidle's rollout buffer has none of these",
    "features_extractor_class": "write it as --network module:callable",
    "n_lstm_layers": "unidle has one recurrent layer",
    "normalize": "unidle normalises observations and rewards for PPO only",
}


def refuse(key: str, value: Any, source: str, inside: str = "") -> None:
    """UsageError for a setting that unidle does not have, unless its value has no effect."""
    if key in _NOT_LEARNING or value in _WITHOUT_EFFECT.get(key, ()):
        return
    reason = _REASONS.get(key, "unidle has no such setting")
    raise UsageError(f"{source}: `{inside}{key}: {value}` is not supported: {reason}; remove it to train without.")


def note_ignored(key: str, value: Any, notes: list[str]) -> None:
    """Add a message about a setting of ElegantRL that unidle does not have."""
    notes.append(f"`{key}` has no equivalent in unidle and is ignored.")


def is_linear(value: Any) -> bool:
    """Whether it is rl-zoo's linear schedule: `lin_3e-4` anneals from 3e-4 to 0 over the run."""
    return isinstance(value, str) and value.startswith("lin_")


def _policy(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    name = str(value)
    if name.endswith("LstmPolicy"):
        notes.append(f"`policy: {value}` becomes `recurrent: lstm`; actor and critic share the LSTM.")
    elif name not in ("MlpPolicy", "CnnPolicy", "MultiInputPolicy"):
        raise UsageError(f"{source}: `policy: {value}` is not supported; write it as --network module:callable.")
    recurrent = {"recurrent": "lstm"} if name.endswith("LstmPolicy") else {}
    # Stable-Baselines3 has no hidden layers behind its CNN, unless net_arch gives some.
    return {**recurrent, "net_arch": ()} if name.startswith("Cnn") else recurrent


def _learning_rate(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    if is_linear(value):
        return {"learning_rate": value.removeprefix("lin_"), "lr_schedule": "linear"}
    return {"learning_rate": value}


def _clip_range(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    if is_linear(value):
        return {"clip_range": value.removeprefix("lin_"), "clip_schedule": "linear"}
    return {"clip_range": value}


def _clip_range_vf(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    if is_linear(value):
        value = value.removeprefix("lin_")
        notes.append(f"`clip_range_vf` stays constant at {value}; unidle has no schedule for it.")
    clip_range = coerce("clip_range_vf", value, source)
    # In rl-zoo, a negative number means no clipping.
    return {"clip_range_vf": None if clip_range is not None and clip_range < 0 else clip_range}


def _seed(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    return {} if value is None else {"seed": value}  # unidle always has a seed


def _device(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    if str(value).partition(":")[0] in ("auto", "cpu", "cuda"):
        return {"device": "cuda" if value == "cuda:0" else value}
    notes.append(f"`device: {value}` is not supported and is ignored.")
    return {}


def _normalize(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    """VecNormalize: true for both observations and rewards, or its arguments."""
    options = _plain("normalize", value, source)
    if isinstance(options, bool):
        options = {"norm_obs": options, "norm_reward": options}
    if not isinstance(options, dict):
        raise UsageError(
            f"{source}: `normalize` must be true, false or dict(norm_obs=…, norm_reward=…), not {value!r}."
        )
    for name in options.keys() - {"norm_obs", "norm_reward", "gamma"}:  # as in rl-zoo, γ is the recipe's
        refuse(str(name), options[name], source, "normalize.")
    if algo != "ppo":
        if any(options.get(name, True) for name in ("norm_obs", "norm_reward")):
            refuse("normalize", value, source)
        return {}
    return {
        "normalize_obs": options.get("norm_obs", True),
        "normalize_reward": options.get("norm_reward", True),
    }


def _env_kwargs(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    return {"env_kwargs": _plain("env_kwargs", value, source)}


def _policy_kwargs(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    options = _plain("policy_kwargs", value, source)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise UsageError(f"{source}: `policy_kwargs` must be a mapping or dict(…), not {value!r}.")
    values: dict[str, Any] = {}
    for name, option in options.items():
        if name == "net_arch":
            values |= _net_arch(option, source, algo)
        elif name == "activation_fn":
            values |= _activation_fn(option, source)
        elif name == "lstm_hidden_size":
            values["recurrent_size"] = option
        elif name == "n_critics":
            values["n_critics"] = option
        elif name == "ortho_init" and algo == "ppo":
            values["ortho_init"] = option
        elif name in sb3_optimizer.KEYS:
            values |= sb3_optimizer.optimizer(options, source, algo)
        elif name == "enable_critic_lstm":
            notes.append(f"`enable_critic_lstm: {option}`: in unidle actor and critic share one LSTM.")
        elif name in sb3_sde.READERS:
            values |= sb3_sde.READERS[name](option, source, notes, algo)
        elif name == "log_std_init" and algo == "ppo":
            values["log_std_init"] = option
            notes.append(
                "`log_std_init` is in action units in SB3, but in units of half the action range in unidle; "
                "they are equal for actions in [-1, 1]."
            )
        elif name == "log_std_init":
            values |= {name: option} if algo in owners_of(name) else {}
        else:
            refuse(str(name), option, source, "policy_kwargs.")
    return values


def _net_arch(value: Any, source: str, algo: str) -> dict[str, Any]:
    """Layers as [64, 64], {pi: […], vf: […]}, {pi: […], qf: […]} or the old [{pi: […], vf: […]}]."""
    layers = value if isinstance(value, list) else [value]
    if not layers or not isinstance(layers[-1], dict):
        return {"net_arch": value}
    heads = dict(layers[-1])
    actor, critic = heads.pop("pi", []), heads.pop("vf" if algo == "ppo" else "qf", [])
    if layers[:-1] or heads:
        raise UsageError(
            f"{source}: `net_arch: {value}` is not supported: unidle shares all layers (`share_trunk`) or none; write "
            "dict(pi=[…], vf=[…]), or dict(pi=[…], qf=[…])."
        )
    if actor == critic:
        return {"net_arch": actor}
    if algo not in owners_of("critic_arch"):
        raise UsageError(
            f"{source}: `net_arch` is {actor} for the actor and {critic} for the critic, but unidle's {algo.upper()} "
            "uses the same layers for both; make them equal."
        )
    return {"net_arch": actor, "critic_arch": critic}


def _activation_fn(value: Any, source: str) -> dict[str, Any]:
    name = str(value).rpartition(".")[2].lower()  # nn.ReLU, torch.nn.ReLU, relu
    known = typing.get_args(Activation)
    if name not in known:
        raise UsageError(f"{source}: `activation_fn: {value}` is not supported; unidle has {', '.join(known)}.")
    return {"activation": name}


def _ent_coef(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    """A number, auto, or auto_0.1: learned from 0.1 on."""
    if isinstance(value, str) and value.startswith("auto_"):
        return {"ent_coef": "auto", "ent_coef_init": value.removeprefix("auto_")}
    return {"ent_coef": value}


def _env_wrapper(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    """A class, or a list of classes and {class: arguments}, each as package.module.Class."""
    given = value if isinstance(value, list) else [value]
    return {"wrappers": [_wrapper(entry, source) for entry in given if entry]}


def _frame_stack(value: Any, source: str, notes: list[str], algo: str) -> dict[str, Any]:
    return {} if value is None else {"frame_stack": value}


def _wrapper(entry: Any, source: str) -> Any:
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, kwargs),) = entry.items()
        return {_importable(name): kwargs} if kwargs else _importable(name)
    if isinstance(entry, str):
        return _importable(entry)
    raise UsageError(f"{source}: `env_wrapper` contains {entry!r}; write package.module.Class, or {{Class: {{…}}}}.")


def _importable(name: str) -> str:
    """`package.module.Class` as `package.module:Class`."""
    return name if ":" in name else ":".join(name.rpartition(".")[::2])


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
    "ent_coef": _ent_coef,
    "env_wrapper": _env_wrapper,
    "frame_stack": _frame_stack,
    **sb3_sde.READERS,
}


# Names that identify such a file.
MARKS = {
    *RENAMED,
    *(key for key in READERS if not section_of(key)),
    "n_minibatches",
    "frame_stack",
    "optimize_memory_usage",
    *(key for key in sb3_off_policy.KEYS if not section_of(key)),
}


def _plain(key: str, value: Any, source: str) -> Any:
    """`value`, evaluated if it is Python text such as "dict(net_arch=[64, 64])"."""
    if not isinstance(value, str):
        return value
    try:
        return _value_of(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise UsageError(
            f"{source}: `{key}` contains Python code, which unidle does not run; "
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
