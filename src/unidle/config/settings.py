"""The one tree of settings: what changes learning (recipe), only speed (engine), and the run."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from unidle.errors import UsageError

Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]
Schedule = Literal["constant", "linear"]

OFF_POLICY = ("sac", "td3", "dqn")  # algorithms that learn from a replay buffer

_Value = TypeVar("_Value")
# A setting that unidle chooses where it is None; any other is then switched off, or not given.
OrAuto = Annotated[_Value, "auto"] | None  # the word lies within, where it is seen by whoever is given the type


@dataclass(frozen=True)
class Recipe:
    """What changes learning."""

    algo: Literal["ppo", "sac", "td3", "dqn"] = "ppo"
    """Learning algorithm."""
    n_envs: int = 1
    """Environments collected from in parallel."""
    n_steps: int = 2048
    """Steps per environment and iteration; n_envs × n_steps is the total batch."""
    batch_size: int | Literal["auto"] = 64
    """Minibatch size; PPO: a divisor of n_envs × n_steps, auto: the largest not above the preset's."""
    n_epochs: int = 10
    """Passes over the total batch per iteration."""
    net_arch: tuple[int, ...] = (64, 64)
    """Hidden layers of actor and critic."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    share_trunk: bool = False
    """One trunk for actor and critic instead of one each."""
    network: str | None = None
    """Your own network, as module:callable; see docs/networks.md."""
    actor_obs: OrAuto[tuple[str, ...]] = None
    """Keys of a Dict observation that the actor sees, such as policy; auto: all."""
    critic_obs: OrAuto[tuple[str, ...]] = None
    """Keys that the critic sees, such as policy,privileged; auto: all."""
    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Recurrent layer ahead of the trunks."""
    recurrent_size: int = 128
    """Width of the recurrent layer."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    lr_schedule: Schedule = "constant"
    """linear: the learning rate falls to 0 at the end of the run."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation."""
    clip_range: float = 0.2
    """PPO's ε: how far the new policy's ratio counts."""
    clip_schedule: Schedule = "constant"
    """linear: the clip range falls to 0 at the end of the run."""
    clip_range_vf: float | None = None
    """Clips the value's change too, at this distance; none: it does not."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """Ends an iteration's epochs once the policy moved 1.5 times this KL; none: never."""
    normalize_advantage: bool = True
    """Advantages of a minibatch to mean 0 and deviation 1."""
    normalize_obs: bool = False
    """Observations to mean 0 and deviation 1, by running statistics."""
    normalize_reward: bool = False
    """Rewards by the deviation of the discounted return."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions, in units of half the action range."""
    action_distribution: Literal["gaussian", "squashed", "beta"] = "gaussian"
    """Distribution of continuous actions; squashed (by tanh) and beta need bounds, and clip nothing."""
    discretize: int | None = None
    """Turns each Box action into this many bins; none: continuous."""
    overlap: Literal["auto", "off", "strict"] = "auto"
    """strict: collect while learning, with weights as they were; auto: for PPO with a GPU and 48 or more `n_envs`."""
    precision: Literal["bf16", "tf32", "fp32"] = "tf32"
    """Matrix products on CUDA, sums in fp32; the CPU always uses fp32."""

    buffer_size: int = 1_000_000
    """SAC, DQN: steps that are remembered."""
    learning_starts: int = 1000
    """SAC, DQN: steps with random actions before anything is learned."""
    utd_ratio: float = 1.0
    """SAC, DQN: updates for each environment step after those."""
    adam_eps: float = 1e-8
    """SAC, DQN: what Adam adds to a deviation before it divides by it; PPO's is 1e-5."""
    weight_init: Literal["torch", "he"] = "torch"
    """SAC: first weights, as torch's layers have them; he: He's uniform ones, no biases, and heads close to 0."""
    n_step: int = 1
    """SAC, DQN: steps that a return sums up before it trusts a value."""
    per: bool = False
    """SAC, DQN: what surprised more is learned from more often."""
    per_alpha: float = 0.6
    """How much more often; 0: no more."""
    per_beta: float = 0.4
    """How far that is corrected for at the start of the run; in full at its end."""
    tau: float = 0.005
    """SAC, DQN: how far target networks move at a time."""
    n_critics: int = 2
    """SAC: critics, of which the lowest is believed."""
    critic_arch: OrAuto[tuple[int, ...]] = None
    """SAC: hidden layers of the critics; auto: as the actor's."""
    temperature: float | Literal["auto"] = "auto"
    """SAC: weight of the entropy; auto: learned."""
    n_tasks: int = 1
    """SAC: tasks, told by the last numbers of an observation (one-hot); each has its head, temperature and memory."""
    target_entropy: OrAuto[float] = None
    """SAC: entropy that the temperature aims at; auto: minus the number of actions, or 0.98 of a choice's most."""
    value_limit: float | None = None
    """SAC: the critics' loss clips their values and targets to plus or minus this; none: it does not."""
    policy_delay: int = 2
    """TD3: critic updates per update of the actor and the target networks."""
    target_policy_noise: float = 0.2
    """TD3: standard deviation of the noise on target actions (target policy smoothing)."""
    target_noise_clip: float = 0.5
    """TD3: clip range of that noise."""
    exploration_noise: float = 0.1
    """TD3: standard deviation of the exploration noise, in units of half the action range."""
    double_dqn: bool = True
    """DQN: the network chooses the action that its target values."""
    dueling: bool = False
    """DQN: values of states and of actions apart."""
    target_update_interval: int = 1
    """DQN: updates between two moves of the target."""
    exploration_final_eps: float = 0.05
    """DQN: share of random actions in the end."""
    exploration_fraction: float = 0.1
    """DQN: part of the run in which it falls to that."""

    @property
    def on_policy(self) -> bool:
        """Whether an iteration learns only from its own rollout."""
        return self.algo not in OFF_POLICY

    @property
    def total_batch(self) -> int:
        """Transitions per iteration."""
        return self.n_envs * self.n_steps


@dataclass(frozen=True)
class Engine:
    """What changes only speed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the networks live."""
    subproc: OrAuto[bool] = None
    """Environments in worker processes; auto: decided by timing a few steps."""
    workers: OrAuto[int] = None
    """Worker processes; auto: one per core (less one beside a GPU or with overlap), or fewer that take no longer."""
    slices: OrAuto[int] = None
    """Slices of environments per worker, one stepped while another gets its actions; auto: 2, or 1 without a need."""
    pin_cores: OrAuto[bool] = None
    """Keep each worker process on a core, and have them change places; auto: if they take all cores or all but one."""
    compile: bool = False
    """Compile the steps of environments on the device: a minute or less at the start, then fewer kernels a step."""
    graphs: bool = True
    """Replay inference and learning as CUDA graphs; without, each of their kernels is launched from Python."""
    threads: int = 1
    """Threads of torch in the training process."""
    env_timeout: float | None = 300.0
    """Seconds after which a worker that does not come back from a step is started again; none: never."""
    eval_workers: OrAuto[int] = None
    """Processes that evaluate beside training; 0: training waits. auto: half of the cores for several tasks."""
    max_env_restarts: int = 10
    """Faults of one environment in a row, without an episode that ends by itself, that the run bears."""


@dataclass(frozen=True)
class Run:
    """What is trained, how long, and where it is kept."""

    env: str = ""
    """Gymnasium id, or module:callable that returns an environment; it must be given."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, as YAML: '{continuous: true}'."""
    timesteps: int = 1_000_000
    """Environment steps in all, over all environments."""
    seed: int = 0
    """Seed of everything random."""
    run_name: str | None = None
    """Name of the run's folder; none: env, algorithm, preset and seed."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    preset: str | None = None
    """Preset the settings started from; see `unidle presets`."""
    allow_recipe_change: bool = False
    """Take another recipe than that of a preset which reproduces fixed numbers; `unidle tune`: try other recipes."""
    eval_every: OrAuto[int] = None
    """Steps between evaluations in separate environments; auto: a tenth of the run. 0: never."""
    eval_episodes: int = 10
    """Episodes per evaluation."""
    target_return: float | None = None
    """Ends the run once an evaluation reaches this mean return."""
    checkpoint_every: OrAuto[int] = None
    """Steps between checkpoints; auto: a twentieth of the run, or more where saving takes long."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints are kept, beside the best."""
    save_replay_buffer: bool = True
    """SAC, DQN: keep what is remembered in checkpoints; without it a resumed run first collects anew."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra `wandb`; WANDB_MODE=offline works)."""
    trace: bool = False
    """Record a few iterations, every operation and kernel of them, in trace.json.gz for ui.perfetto.dev."""


@dataclass(frozen=True)
class Config:
    """The whole tree. `config.yaml` in a run folder is this, and reproduces the run."""

    recipe: Recipe = field(default_factory=Recipe)
    engine: Engine = field(default_factory=Engine)
    run: Run = field(default_factory=Run)

    def with_values(self, values: dict[str, Any], source: str) -> Config:
        """A copy with flat `values` (n_envs, device, …) laid over it; errors name `source`."""
        parts: dict[str, dict[str, Any]] = {"recipe": {}, "engine": {}, "run": {}}
        for key, value in values.items():
            section = section_of(key)
            if section is None:
                raise UsageError(unknown_key(key, source))
            parts[section][key] = coerce(key, value, source)
        return Config(
            recipe=dataclasses.replace(self.recipe, **parts["recipe"]),
            engine=dataclasses.replace(self.engine, **parts["engine"]),
            run=dataclasses.replace(self.run, **parts["run"]),
        )

    def flat(self) -> dict[str, Any]:
        """All settings by their flat names."""
        return {f.name: getattr(part, f.name) for part in self._parts() for f in dataclasses.fields(part)}

    def to_yaml(self) -> str:
        """The text of a config file that `load_yaml` reads back as it was."""
        tree = {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(part).items()}
            for name, part in zip(("recipe", "engine", "run"), self._parts())
        }
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)

    def _parts(self) -> tuple[Recipe | Engine | Run, ...]:
        return self.recipe, self.engine, self.run


def whole_steps(timesteps: int, total_batch: int) -> int:
    """Steps after which a run of `timesteps` ends: iterations are never cut short."""
    return -(-timesteps // total_batch) * total_batch


_FIELD_TYPES: dict[str, tuple[str, Any]] = {
    f.name: (section, typing.get_type_hints(part)[f.name])
    for section, part in (("recipe", Recipe), ("engine", Engine), ("run", Run))
    for f in dataclasses.fields(part)
}


def is_left_to_unidle(kind: Any) -> bool:
    """Whether a type, with its annotations, is an `OrAuto`."""
    return any("auto" in getattr(option, "__metadata__", ()) for option in typing.get_args(kind))


LEFT_TO_UNIDLE = {
    name
    for part in (Recipe, Engine, Run)
    for name, kind in typing.get_type_hints(part, include_extras=True).items()
    if is_left_to_unidle(kind)
}


def section_of(key: str) -> str | None:
    """Which part of the tree a flat name belongs to; None if there is no such setting."""
    return _FIELD_TYPES[key][0] if key in _FIELD_TYPES else None


def word_for_none(key: str) -> str:
    """What a user calls the None of a setting: `auto` where unidle then chooses, else `none`."""
    return "auto" if key in LEFT_TO_UNIDLE else "none"


def unknown_key(key: str, source: str, more: Iterable[str] = (), command: str = "train") -> str:
    """The sentence for a setting that does not exist; `more` are names that are known beside the settings."""
    import difflib

    near = difflib.get_close_matches(str(key), [*_FIELD_TYPES, "recipe", "engine", "run", *more], n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"`unidle {command} --help` lists them all."
    return f"{source}: there is no setting `{key}`; {hint}"


def coerce(key: str, value: Any, source: str) -> Any:
    """`value` as the declared type of setting `key`, or a UsageError that says what the type is."""
    expected = _FIELD_TYPES[key][1]
    if hasattr(value, "tolist"):
        value = value.tolist()  # numbers and arrays of NumPy
    converted = None if value == "auto" and key in LEFT_TO_UNIDLE else _convert(value, expected)
    if converted is _MISMATCH:
        raise UsageError(f"{source}: `{key}` must be {_describe(expected, word_for_none(key))}, not {value!r}.")
    return converted


_MISMATCH = object()


def _convert(value: Any, expected: Any) -> Any:
    """`value` as `expected`, or _MISMATCH. YAML reads 1e6 as text, so numbers may be text."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        # None first: for `str | None`, the text "none" is none.
        expected_types = sorted(typing.get_args(expected), key=lambda t: t is not type(None))
        options = (_convert(value, option) for option in expected_types)
        return next((option for option in options if option is not _MISMATCH), _MISMATCH)
    if origin is Literal:
        if value is False and "off" in typing.get_args(expected):
            return "off"  # that is how YAML reads off
        return value if value in typing.get_args(expected) else _MISMATCH
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            return _MISMATCH
        converted = tuple(_convert(item, typing.get_args(expected)[0]) for item in items)
        return _MISMATCH if _MISMATCH in converted else converted
    if origin is dict:
        return value if isinstance(value, dict) else _MISMATCH
    if expected is type(None):
        return None if value is None or value == "none" else _MISMATCH
    if expected in (int, float):
        return _number(value, expected)
    return value if type(value) is expected else _MISMATCH


def _number(value: Any, expected: type) -> Any:
    if isinstance(value, bool):
        return _MISMATCH
    if expected is int and isinstance(value, int):
        return value  # by way of a float, a large seed would change
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return _MISMATCH
    if expected is int:
        return int(number) if number.is_integer() else _MISMATCH
    return _MISMATCH if math.isnan(number) else number


def _describe(expected: Any, none: str) -> str:
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option, none) for option in typing.get_args(expected))
    if origin is Literal:
        return " or ".join(repr(option) for option in typing.get_args(expected))
    if origin is tuple:
        is_text = typing.get_args(expected)[0] is str
        return "a list of names such as policy,privileged" if is_text else "a list of whole numbers such as 64,64"
    if origin is dict:
        return "a mapping"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(expected, none)


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """The mapping in a YAML file, or a UsageError."""
    try:
        with path.open(encoding="utf-8") as text:
            tree = yaml.load(text, Loader=loader)
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); give a YAML text file.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: `!!float abc`
        at = getattr(error, "problem_mark", None)
        where = f" at line {at.line + 1}" if at else ""
        raise UsageError(f"{path} is not valid YAML{where}; mend the file.") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path} must hold `name: value` lines.")
    return tree


def flatten_sections(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """{'recipe': {'n_envs': 8}} → {'n_envs': 8}, refusing a setting in the wrong section."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in ("recipe", "engine", "run"):
            flat[key] = value
            continue
        if not isinstance(value, dict):
            raise UsageError(f"{source}: `{key}` must hold `name: value` lines.")
        for name, inner in value.items():
            section = section_of(name)
            if section is not None and section != key:
                raise UsageError(f"{source}: `{name}` belongs in section `{section}`, not `{key}`; move it.")
            flat[name] = inner
    return flat


def run_config_file(folder: Path) -> Path:
    """The config.yaml of a run folder; UsageError if it is none."""
    path = folder / "config.yaml"
    if not path.exists():
        raise UsageError(
            f"{folder} is not a run folder (it has no config.yaml); give the folder of a run, as runs/my-run."
        )
    return path


def refuse_second_run(folder: Path) -> None:
    """UsageError if there is already a run in `folder`."""
    if (folder / "config.yaml").exists():
        raise UsageError(
            f"There is already a run in {folder}; go on with --resume {folder}, or choose another --run-name."
        )


def load_yaml(path: Path) -> Config:
    """The config of a run folder, exactly as `Config.to_yaml` wrote it."""
    return Config().with_values(flatten_sections(read_yaml(path), str(path)), str(path))
