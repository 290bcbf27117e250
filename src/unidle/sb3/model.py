"""A model: settings, environments, and the state of learning, which is the content of a checkpoint in memory.

Each `learn` is a run of unidle's trainer that starts from that state and leaves the next one.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import signal
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces

from unidle.algos.registry import AnyPolicy
from unidle.algos.schedules import Schedule
from unidle.api import fit_to_env, start
from unidle.config import Config
from unidle.config.presets import load_preset
from unidle.config.settings import OffPolicyRecipe
from unidle.config.validate import validated
from unidle.engine.agent import Agent
from unidle.engine.callbacks import CallbackContext
from unidle.engine.checkpoint.run_folder import without_replay_buffer
from unidle.engine.checkpoint.snapshot import snapshot
from unidle.engine.placement import choose_device
from unidle.engine.progress import Progress
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.sb3.arguments import changed_arguments, read_arguments
from unidle.sb3.envs import Envs, normaliser_of, resolve_envs
from unidle.sb3.foreign_zip import Weights, read_sb3_zip, take_over
from unidle.sb3.logger import Logger
from unidle.sb3.training import Training, as_callback
from unidle.sb3.untrained import untrained_state
from unidle.sb3.zip_file import File, Saved, is_own, open_zip, read_zip, write_zip

_NEVER = 2**62  # steps between checkpoints: a model is saved by `save`
_NOT_SETTINGS = ("self", "env", "settings", "tensorboard_log", "verbose", "__class__", "_init_setup_model")


class Model:
    """What PPO, SAC, TD3 and DQN have in common."""

    algo: ClassVar[str]

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of the constructor, by name."""
        given = {name: value for name, value in arguments.items() if name not in _NOT_SETTINGS}
        envs = resolve_envs(arguments["env"]) if arguments["env"] is not None else None
        settings = {**(envs.settings if envs else {}), **(arguments["settings"] or {})}
        if "n_envs" in settings:
            raise UsageError(
                "`n_envs` follows from the environment; pass make_vec_env('CartPole-v1', n_envs=8) as env."
            )
        read = read_arguments(self.algo, given, envs.n_envs if envs else 1, settings)
        run = dataclasses.replace(read.config.run, seed=_seed(given["seed"]))
        self._setup(dataclasses.replace(read.config, run=run), envs, read.schedules, read.network)
        self.verbose, self.tensorboard_log = arguments["verbose"], arguments["tensorboard_log"]
        if self.verbose:
            print(*read.notes, sep="\n", end="\n" if read.notes else "")

    def _setup(
        self, config: Config, envs: Envs | None, schedules: dict[str, Schedule], network: NetworkFactory | None
    ) -> None:
        self.config, self._envs, self._schedules, self._network = config, envs, schedules, network
        if envs is not None:
            self._validated(config)
        self.num_timesteps = 0
        self.logger = Logger()
        self.verbose, self.tensorboard_log = 0, None
        self._learned: dict[str, Any] | None = None  # the state
        self._agent: Agent | None = None  # made from the state
        self._context: CallbackContext | None = None  # during `learn`: where the state comes from
        self._starts = 0  # how many runs began in new environments
        self._run_name: str | None = None  # of the latest run
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(
        self,
        total_timesteps: int,
        callback: Any = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for `total_timesteps` steps; again, to train further.

        With `reset_num_timesteps=False` the environments, the counters and the run folder continue too. `log_interval`
        has no effect: a run logs about 1000 times.
        """
        envs = self._require_envs()
        state, continues = self._next_state(reset=reset_num_timesteps), False
        if state is not None:
            continues = "collector" in state
            self.num_timesteps = state["step"]
        elif reset_num_timesteps:
            self.num_timesteps = 0
        timesteps = self.num_timesteps + int(total_timesteps)
        config = self._run_config(timesteps, tb_log_name or type(self).__name__, continues=continues)
        arguments = {
            "total_timesteps": timesteps,
            "log_interval": log_interval,
            "tb_log_name": tb_log_name,
            "reset_num_timesteps": reset_num_timesteps,
            "progress_bar": progress_bar,
        }
        training = Training(self, as_callback(callback), arguments)
        envs.begin()
        try:
            run = start(
                config,
                maker=envs.maker,
                network=self._network,
                callbacks=training.callbacks(),
                quiet=not (self.verbose or progress_bar),
                resume="auto" if continues else None,
                state=state,
                schedules=self._schedules,
            )
        finally:
            self._unfollow()
        if run.stopped_by is not None:
            raise KeyboardInterrupt if run.stopped_by == signal.SIGINT else SystemExit(128 + run.stopped_by)
        return self

    def _next_state(self, *, reset: bool) -> dict[str, Any] | None:
        """The state that a run starts from; without environments if they start anew."""
        state = self._learned
        if state is None:
            return None
        if reset:
            state = {"algo": state["algo"], "spaces": state["spaces"], **dataclasses.asdict(Progress())}
        return state

    def _run_config(self, timesteps: int, name: str, *, continues: bool) -> Config:
        """The validated settings of a run, and the folder in which it keeps its metrics and report."""
        parent = self.tensorboard_log
        if parent is None:
            if self._temporary is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="unidle-", ignore_cleanup_errors=True)
            parent = self._temporary.name
        if not continues:
            numbers = [0, *(int(path.name.rpartition("_")[2]) for path in Path(parent).glob(f"{name}_[0-9]*"))]
            self._run_name = f"{name}_{max(numbers) + 1}"
            self._starts += 1
        run = dataclasses.replace(
            self.config.run,
            timesteps=timesteps,
            runs_dir=str(parent),
            run_name=self._run_name,
            tensorboard=self.tensorboard_log is not None,
            checkpoint_every=self.config.run.checkpoint_every or _NEVER,
            seed=self.config.run.seed + self._starts - 1,  # new environments, new episodes
        )
        self.logger = Logger(str(Path(parent) / str(self._run_name)))
        return self._validated(dataclasses.replace(self.config, run=run))

    def _validated(self, config: Config) -> Config:
        envs = self._require_envs()
        named = dataclasses.replace(config, run=dataclasses.replace(config.run, env=envs.maker.name))
        fitted, _ = fit_to_env(named, envs.maker)
        size = load_preset(config.run.preset or "classic").recipe.batch_size
        assert isinstance(size, int)
        return validated(fitted, size)

    def follow(self, context: CallbackContext) -> None:
        """The run has come further: for callbacks that use the model."""
        self._context, self._learned, self._agent = context, None, None
        self.num_timesteps = context.record["step"]
        self.logger.write = context.log

    def keep(self) -> None:
        """The run ends: keep the state that it leaves."""
        self._state()

    def _unfollow(self) -> None:
        self._context = None
        self.logger.write = lambda values: None

    def _state(self) -> dict[str, Any]:
        """The state of learning; that of an untrained model if there is none."""
        if self._learned is None:
            if self._context is not None:
                self._learned = self._context.state()
            else:
                self._learned = untrained_state(self._validated(self.config), self._require_envs().maker, self._network)
        return self._learned

    # -- acting --------------------------------------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The policy as it is now, for inference."""
        if self._agent is None:
            self._agent = Agent(self._state(), self.config, self._network, self.config.engine.device)
        return self._agent

    def predict(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        episode_start: Sequence[bool] | np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, np.ndarray | None]:
        """The actions for an observation or a batch of them, and the next recurrent state or None."""
        return self.agent.predict_from(observation, state, episode_start, deterministic=deterministic)

    @property
    def policy(self) -> AnyPolicy:
        """A copy of the policy: a torch module of unidle's."""
        return self.agent.policy

    @property
    def observation_space(self) -> spaces.Space:
        """The space of observations."""
        return self.agent.obs_layout.space

    @property
    def action_space(self) -> spaces.Space:
        """The space of actions."""
        return self.agent.action_layout.space

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return choose_device(self.config.engine.device)

    # -- environments --------------------------------------------------------------------------------------------------

    @property
    def n_envs(self) -> int:
        """The number of environments."""
        return self.config.recipe.n_envs

    def get_env(self) -> Any:
        """The vector environment that the model was given, or one with its environment; None if it has none."""
        return self._envs and self._envs.vec_env

    @property
    def env(self) -> Any:
        """As `get_env`."""
        return self.get_env()

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Train in other environments from now on, which have the same spaces; as many as before."""
        envs = resolve_envs(env)
        if envs.n_envs != self.n_envs:
            raise UsageError(
                f"The model has {self.n_envs} environments, but got {envs.n_envs}; pass as many, or save it and load "
                "it with the new ones."
            )
        self._envs = envs
        self.config = self.config.with_values(envs.settings, "env")
        if self._learned is not None:
            self._learned = {name: value for name, value in self._learned.items() if name != "collector"}

    def get_vec_normalize_env(self) -> Any:
        """The `VecNormalize` around the environments; None if there is none."""
        return normaliser_of(self.get_env())

    def _require_envs(self) -> Envs:
        if self._envs is None:
            raise UsageError("The model has no environment yet; pass env=… to load, or call set_env.")
        return self._envs

    # -- parameters ----------------------------------------------------------------------------------------------------

    def get_parameters(self) -> dict[str, Any]:
        """Copies of the networks' weights and the optimisers' states, by unidle's names."""
        algo = self._state()["algo"]
        return snapshot({name: value for name, value in algo.items() if name != "experience"})

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: Any = "auto") -> None:
        """Set what `get_parameters` returned, or those of a saved model; some of them without `exact_match`."""
        given = load_path_or_dict
        if not isinstance(given, dict):
            given = type(self).load(given).get_parameters()
        state = self._state()
        own = {name for name in state["algo"] if name != "experience"}
        if given.keys() - own or (exact_match and own - given.keys()):
            raise UsageError(
                f"The parameters are {', '.join(sorted(given))}, but this model has {', '.join(sorted(own))}; pass "
                "those that get_parameters returns."
            )
        changed = {**state, "algo": {**state["algo"], **snapshot(given)}}
        self._agent = Agent(changed, self.config, self._network, self.config.engine.device)  # before: it may not fit
        self._learned = changed

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: File, exclude: Any = None, include: Any = None) -> None:
        """Save the model, without its replay buffer, as a zip; `exclude` and `include` have no effect."""
        state = without_replay_buffer(self._state())
        kept = ("algo", "spaces", "env_statistics", *dataclasses.asdict(Progress()))
        settings = dataclasses.asdict(self.config.recipe) | {"seed": self.config.run.seed + self._starts}
        needs = [*self._schedules, *(["policy_kwargs"] if self._network else [])]
        write_zip(
            path, Saved(self.algo, settings, needs), snapshot({name: state[name] for name in kept if name in state})
        )

    @classmethod
    def load(
        cls,
        path: File,
        env: Any = None,
        device: Any = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a model that unidle or Stable-Baselines3 saved; `kwargs` are arguments that replace the saved ones.

        Nothing in the file is executed: schedules and custom networks, which are Python objects, are passed again.
        """
        given = {**(custom_objects or {}), **kwargs, "device": device}
        with open_zip(path) as archive:
            if not is_own(archive):
                arguments, pickled, weights = read_sb3_zip(archive, path)
                if env is None:
                    raise UsageError(
                        f"{path} is a model of Stable-Baselines3; pass its environment: load(path, env=…)."
                    )
                _warn_of_missing([name for name in pickled if name not in given], "has its default")
                return cls._taken_over(arguments | given | {"env": env}, weights)
            saved, state = read_zip(archive, path)
        if saved.algo != cls.algo:
            raise UsageError(f"{path} is a model of {saved.algo.upper()}; load it with {saved.algo.upper()}.load.")
        _warn_of_missing([name for name in saved.needs if name not in given], "stays at its initial value")
        return cls._loaded(saved, state, env, given)

    @classmethod
    def _taken_over(cls, arguments: dict[str, Any], weights: Weights) -> Self:
        create: Any = cls  # a subclass, whose constructor has Stable-Baselines3's arguments
        known = inspect.signature(cls).parameters
        model: Self = create(**{name: value for name, value in arguments.items() if name in known})
        model._learned = take_over(cls.algo, model._state(), model.policy, weights)
        model._agent = None
        return model

    @classmethod
    def _loaded(cls, saved: Saved, state: dict[str, Any], env: Any, given: dict[str, Any]) -> Self:
        model = cls.__new__(cls)
        others = {name: given.pop(name) for name in ("verbose", "tensorboard_log") if name in given}
        settings = {**saved.settings, "preset": cls.algo if cls.algo != "ppo" else "classic", "eval_every": 0}
        config = Config().with_values({**settings, "save_replay_buffer": False}, "model")
        read = changed_arguments(cls.algo, given, config)
        if "policy_kwargs" in saved.needs and read.network is None:
            raise UsageError(
                "The model has a custom network; pass policy_kwargs with its features_extractor_class to load."
            )
        envs, config = None, read.config
        if env is not None:
            envs = resolve_envs(env)
            config, state = _with_n_envs(config, state, envs.n_envs)
            config = config.with_values(envs.settings, "env")
        model._setup(config, envs, read.schedules, read.network)
        model.verbose, model.tensorboard_log = others.get("verbose", 0), others.get("tensorboard_log")
        model._learned, model.num_timesteps = state, state["step"]
        return model


def _with_n_envs(config: Config, state: dict[str, Any], n_envs: int) -> tuple[Config, dict[str, Any]]:
    """The settings and the state for another number of environments; as many updates per iteration as before."""
    recipe = config.recipe
    if n_envs == recipe.n_envs:
        return config, state
    algo = dict(state["algo"])
    if isinstance(recipe, OffPolicyRecipe):
        ratio = recipe.utd_ratio * recipe.n_envs / n_envs
        return config.with_values({"n_envs": n_envs, "utd_ratio": ratio}, "env"), state
    algo["return_carry"] = torch.zeros(n_envs)
    return config.with_values({"n_envs": n_envs}, "env"), {**state, "algo": algo}


def _warn_of_missing(names: list[str], instead: str) -> None:
    for name in names:
        warnings.warn(
            f"`{name}` of the saved model is a Python object, which is not read; it {instead} unless you pass it to "
            "load.",
            stacklevel=3,
        )


def _seed(seed: int | None) -> int:
    """The seed, or a random one."""
    return secrets.randbelow(2**31) if seed is None else int(seed)
