"""A model: settings, environments, and the state of learning, which is the content of a checkpoint in memory.

Each `learn` is a run of unidle's trainer that starts from that state and leaves the next one.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import shutil
import signal
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
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
from unidle.config.python_words import as_argument, python_words
from unidle.config.validate import validated
from unidle.engine.agent import Agent
from unidle.engine.callbacks import CallbackContext
from unidle.engine.checkpoint.snapshot import snapshot
from unidle.engine.placement import choose_device
from unidle.engine.progress import Progress
from unidle.errors import ResumableError, UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.sb3.absent import explain_absent
from unidle.sb3.arguments import read_arguments
from unidle.sb3.envs import Envs, normaliser_of, resolve_envs
from unidle.sb3.fixed_argument import FixedArgument
from unidle.sb3.foreign_zip import Weights, convert_weights, read_sb3_zip
from unidle.sb3.logger import Logger
from unidle.sb3.run_name import reserve_folder
from unidle.sb3.saved_model import read_model, usable_objects, warn_of_missing, write_model
from unidle.sb3.space_checks import check_spaces
from unidle.sb3.training import Training, as_callback
from unidle.sb3.untrained import untrained_state
from unidle.sb3.zip_file import File, is_own, open_zip

_NEVER = 2**62  # steps between checkpoints: a model is saved by `save`
_NOT_SETTINGS = ("self", "env", "settings", "tensorboard_log", "verbose", "__class__", "_init_setup_model")


def _show(name: str, value: str | None) -> str:
    """A setting in a message: the argument of the constructor, or `settings` if it has none of that name."""
    if name == "algo" and value is not None:
        return value.strip('"').upper()
    if name in ("batch_size", "n_steps", "n_epochs", "buffer_size", "learning_rate", "normalize_advantage", "device"):
        return as_argument(name, value)
    if name == "n_envs":
        return "`n_envs` of make_vec_env"
    return f'`settings={{"{name}": {value or "…"}}}`'


@explain_absent
class Model:
    """What PPO, SAC, TD3 and DQN have in common."""

    algo: ClassVar[str]
    learning_rate = FixedArgument()
    batch_size = FixedArgument()
    gamma = FixedArgument()

    @python_words(_show)
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
        self.ep_info_buffer = _episodes(arguments["stats_window_size"])
        if envs is not None:
            check_spaces(self.algo, None if read.network else arguments["policy"], envs)
            if given["seed"] is not None:  # for what the script does with them itself
                envs.vec_env.seed(given["seed"])
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
        self.ep_info_buffer = _episodes(100)
        self._learned: dict[str, Any] | None = None  # the state
        self._agent: Agent | None = None  # made from the state
        self._context: CallbackContext | None = None  # during `learn`: where the state comes from
        self._is_current = False  # whether the state is that of the context
        self._starts = 0  # how many runs began in new environments
        self._folder: Path | None = None  # of the latest run
        self._temporary: str | None = None  # the parent folder of runs that are not kept

    # -- learning ------------------------------------------------------------------------------------------------------

    @python_words(_show)
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
        self._refuse_while_learning("learn")
        envs = self._require_envs()
        if reset_num_timesteps:
            self.ep_info_buffer.clear()
        state = self._next_state(reset=reset_num_timesteps)
        continues = state is not None and "collector" in state
        timesteps = (state["step"] if state else 0) + int(total_timesteps)
        arguments = {
            "total_timesteps": timesteps,
            "log_interval": log_interval,
            "tb_log_name": tb_log_name,
            "reset_num_timesteps": reset_num_timesteps,
            "progress_bar": progress_bar,
        }
        training = Training(self, as_callback(callback), arguments, state)
        config = self._run_config(timesteps, tb_log_name or type(self).__name__, continues=continues)
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
        except ResumableError as error:
            how = "Fix it, then call learn again with reset_num_timesteps=False."
            raise ResumableError(error.what, how) from None
        finally:
            self._detach()
        if run.stopped_by is not None:
            raise KeyboardInterrupt if run.stopped_by == signal.SIGINT else SystemExit(128 + run.stopped_by)
        return self

    def _next_state(self, *, reset: bool) -> dict[str, Any] | None:
        """The state that a run starts from; without environments if they are reset."""
        state = self._learned
        if state is None:
            return None
        if reset:
            return {"algo": state["algo"], "spaces": state["spaces"], **dataclasses.asdict(Progress())}
        return dict(state)

    def _run_config(self, timesteps: int, name: str, *, continues: bool) -> Config:
        """The validated settings of a run, and the folder in which it keeps its metrics and report."""
        parent = None if self.tensorboard_log is None else Path(self.tensorboard_log)
        if parent is None:
            if self._temporary is None:
                self._temporary = tempfile.mkdtemp(prefix="unidle-")
                weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
            parent = Path(self._temporary)
        starts = self._starts if continues else self._starts + 1
        run = dataclasses.replace(
            self.config.run,
            timesteps=timesteps,
            runs_dir=str(parent),
            tensorboard=self.tensorboard_log is not None,
            checkpoint_every=self.config.run.checkpoint_every or _NEVER,
            seed=self.config.run.seed + starts - 1,  # new environments, new episodes
        )
        config = self._validated(dataclasses.replace(self.config, run=run))
        if not continues or self._folder is None or self._folder.parent != parent:
            self._folder = reserve_folder(parent, name)
        self._starts, self.logger = starts, Logger(str(self._folder))
        return config.with_run(run_name=self._folder.name)

    def _validated(self, config: Config) -> Config:
        envs = self._require_envs()
        if envs.are_shared and config.run.eval_every != 0:
            raise UsageError(
                "`eval_every` needs environments of its own, but the model has your environment objects; pass an id or "
                "make_vec_env(…), or evaluate with an EvalCallback."
            )
        named = dataclasses.replace(config, run=dataclasses.replace(config.run, env=envs.maker.name))
        fitted, _ = fit_to_env(named, envs.maker)
        size = load_preset(config.run.preset or "classic").recipe.batch_size
        assert isinstance(size, int)
        return validated(fitted, size)

    def attach(self, context: CallbackContext) -> None:
        """The run has made progress: callbacks may use the model as it is now."""
        self._context, self._is_current, self._agent = context, False, None
        self.num_timesteps = context.record["step"]
        self.logger.write = context.log

    def dump_logs(self, iteration: int = 0) -> None:
        """Write what callbacks logged; `iteration` has no effect."""
        self.logger.dump(self.num_timesteps)

    def save_state(self) -> dict[str, Any]:
        """Keep the state of the run, and return it."""
        return self._state()

    def _detach(self) -> None:
        self._context = None
        self.logger.write = lambda values: None

    def _state(self) -> dict[str, Any]:
        """The state of learning; that of an untrained model if there is none."""
        if self._context is not None and not self._is_current:
            self._learned, self._is_current = self._context.state(), True
        elif self._learned is None:
            self._learned = untrained_state(self._validated(self.config), self._require_envs().maker, self._network)
        return self._learned

    def _refuse_while_learning(self, method: str) -> None:
        if self._context is not None:
            raise UsageError(f"`{method}` has no effect while `learn` is running; call it before or after.")

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
        is_of_reset = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
        if is_of_reset and not isinstance(self.observation_space, spaces.Tuple):
            raise UsageError(
                "predict got a tuple (observation, info), which reset of a gymnasium.Env returns; pass its first item."
            )
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
        self._refuse_while_learning("set_env")
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
        self._refuse_while_learning("set_parameters")
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

    def save(self, path: File, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """Save the model, without its replay buffer, as a zip; `exclude` may name verbose and tensorboard_log."""
        needs = [*self._schedules, *(["policy_kwargs"] if self._network else [])]
        others = {"verbose": self.verbose, "tensorboard_log": self.tensorboard_log and str(self.tensorboard_log)}
        left_out = set(exclude or ()) - set(include or ())
        others = {name: value for name, value in others.items() if name not in left_out}
        write_model(path, self.config, self.config.run.seed + self._starts, needs, self._state(), others)

    @classmethod
    @python_words(_show)
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
        known = inspect.signature(cls).parameters
        given = {**usable_objects(custom_objects, known), **kwargs, "device": device}
        replaced = given.keys() | (custom_objects or {}).keys()
        with open_zip(path) as archive:
            if not is_own(archive):
                arguments, pickled, weights = read_sb3_zip(archive, path)
                if env is None:
                    raise UsageError(
                        f"{path} is a model of Stable-Baselines3; pass its environment: load(path, env=…)."
                    )
                warn_of_missing(pickled, replaced, "has its default")
                arguments = {name: value for name, value in (arguments | given).items() if name in known}
                return cls._converted(arguments | {"env": env}, weights)
            others: dict[str, Any] = {name: given.pop(name) for name in ("verbose", "tensorboard_log") if name in given}
            restored = read_model(archive, path, cls.algo, env, given)
        warn_of_missing(restored.needs, replaced, "stays at its initial value")
        model = cls.__new__(cls)
        model._setup(restored.config, restored.envs, restored.schedules, restored.network)
        others = {**restored.others, **others}
        model.verbose, model.tensorboard_log = others.get("verbose", 0), others.get("tensorboard_log")
        model._learned, model.num_timesteps = restored.state, restored.state["step"]
        return model

    @classmethod
    def _converted(cls, arguments: dict[str, Any], weights: Weights) -> Self:
        create: Any = cls  # a subclass, whose constructor has Stable-Baselines3's arguments
        model: Self = create(**arguments)
        model._learned = convert_weights(cls.algo, model._state(), model.policy, weights)
        model._agent = None
        return model


def _episodes(size: int) -> deque[dict[str, Any]]:
    """Empty: for the latest episodes (r, l and t) while `learn` has a callback."""
    return deque(maxlen=size)


def _seed(seed: int | None) -> int:
    """The seed, or a random one."""
    return secrets.randbelow(2**31) if seed is None else int(seed)
