"""A model: settings, environments, and the state of learning, which is the content of a checkpoint in memory.

Each `learn` is a run of unidle's trainer that starts from that state and leaves the next one.
"""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces

from unidle.algos.schedules import Schedule
from unidle.api import start, start_without_folder
from unidle.config import Config
from unidle.engine.agent import Agent
from unidle.engine.callbacks import CallbackContext
from unidle.engine.placement import choose_device
from unidle.engine.progress import Progress
from unidle.errors import ResumableError, UsageError
from unidle.sb3.absent import explain_absent
from unidle.sb3.arguments import read_arguments, seed_of
from unidle.sb3.envs import Envs, normaliser_of, resolve_envs
from unidle.sb3.errors import argument_errors
from unidle.sb3.features import Extractor
from unidle.sb3.fixed_argument import FixedArgument
from unidle.sb3.foreign_zip import convert_weights, read_sb3_zip
from unidle.sb3.logger import Logger
from unidle.sb3.parameters import parameters_of, with_parameters
from unidle.sb3.run_folders import RunFolders
from unidle.sb3.saved_model import read_model, usable_objects, warn_of_missing, write_model
from unidle.sb3.sb3_policy import PolicyCopy, new_policy
from unidle.sb3.space_checks import check_spaces, refuse_reset_result
from unidle.sb3.training import Training, as_callback, latest_episodes
from unidle.sb3.untrained import untrained_state
from unidle.sb3.validation import validated_for
from unidle.sb3.weights import Weights, from_sb3, require_known, to_sb3
from unidle.sb3.zip_file import File, is_own, open_zip

_NEVER = 2**62  # steps between checkpoints: a model is saved by `save`
_NOT_SETTINGS = ("self", "env", "settings", "tensorboard_log", "verbose", "__class__", "_init_setup_model")


@explain_absent
class Model:
    """What PPO, SAC, TD3 and DQN have in common."""

    algo: ClassVar[str]
    learning_rate = FixedArgument()
    batch_size = FixedArgument()
    gamma = FixedArgument()

    @argument_errors()
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
        run = dataclasses.replace(read.config.run, seed=seed_of(given["seed"]))
        self._setup(dataclasses.replace(read.config, run=run), envs, read.schedules, read.extractor)
        self.verbose, self.tensorboard_log = arguments["verbose"], arguments["tensorboard_log"]
        self.ep_info_buffer = latest_episodes(arguments["stats_window_size"])
        if envs is not None:
            check_spaces(self.algo, arguments["policy"] if read.extractor.kind is None else None, envs)
            if given["seed"] is not None:  # for what the script does with them itself
                envs.vec_env.seed(given["seed"])
        if self.verbose:
            print(*read.notes, sep="\n", end="\n" if read.notes else "")

    def _setup(self, config: Config, envs: Envs | None, schedules: dict[str, Schedule], extractor: Extractor) -> None:
        self.config, self._envs, self._schedules = config, envs, schedules
        self._extractor, self._network = extractor, extractor.network
        if envs is not None:
            validated_for(config, envs)
        self.num_timesteps = 0
        self._run_logger = Logger()
        self.verbose, self.tensorboard_log = 0, None
        self.ep_info_buffer = latest_episodes(100)
        self._learned: dict[str, Any] | None = None  # the state
        self._agent: Agent | None = None  # made from the state
        self._context: CallbackContext | None = None  # during `learn`: where the state comes from
        self._is_current = False  # whether the state is that of the context
        self._starts = 0  # how many runs began in new environments
        self._folders = RunFolders()
        self._own_logger: Any = None  # that the script set
        self._policy_copy: PolicyCopy | None = None  # once the script has read `policy`
        self._copy_is_current = False

    # -- learning ------------------------------------------------------------------------------------------------------

    @argument_errors()
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
        self._read_policy_copy()
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
        common: dict[str, Any] = {
            "maker": envs.maker,
            "network": self._network,
            "callbacks": training.callbacks(),
            "quiet": not (self.verbose or progress_bar),
            "state": state,
            "schedules": self._schedules,
        }
        try:
            if self._folders.latest is None:
                stopped_by = start_without_folder(config, **common)
            else:
                stopped_by = start(config, resume="auto" if continues else None, **common).stopped_by
        except ResumableError as error:
            how = "Fix it, then call learn again with reset_num_timesteps=False."
            raise ResumableError(error.what, how) from None
        finally:
            self._detach()
        if stopped_by is not None:
            raise KeyboardInterrupt if stopped_by == signal.SIGINT else SystemExit(128 + stopped_by)
        if self._policy_copy is not None:
            self._renew_policy_copy(self._policy_copy)
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
        """The validated settings of a run; without `tensorboard_log`, it keeps no metrics, checkpoints or report."""
        starts = self._starts if continues else self._starts + 1
        run = dataclasses.replace(
            self.config.run,
            timesteps=timesteps,
            tensorboard=self.tensorboard_log is not None,
            checkpoint_every=self.config.run.checkpoint_every or _NEVER,
            seed=self.config.run.seed + starts - 1,  # new environments, new episodes
        )
        config = validated_for(dataclasses.replace(self.config, run=run), self._require_envs())
        folder = self._folders.next(self.tensorboard_log, self.config.run, name, continues=continues)
        self._starts = starts
        self._run_logger = Logger(None if folder is None else str(folder))
        return config if folder is None else config.with_run(runs_dir=str(folder.parent), run_name=folder.name)

    def attach(self, context: CallbackContext) -> None:
        """The run has made progress: callbacks may use the model as it is now."""
        self._context, self._is_current, self._agent, self._copy_is_current = context, False, None, False
        self.num_timesteps = context.record["step"]
        self._run_logger.write = context.log
        if "iteration" in context.record:
            self._run_logger.metrics = context.record

    @property
    def logger(self) -> Any:
        """What callbacks log to: the run's, or that of `set_logger`."""
        return self._run_logger if self._own_logger is None else self._own_logger

    def set_logger(self, logger: Any) -> None:
        """Log to a logger of Stable-Baselines3's `configure`, every `log_interval` iterations or episodes."""
        self._own_logger = logger

    @property
    def has_own_logger(self) -> bool:
        """Whether the script has set a logger."""
        return self._own_logger is not None

    def dump_logs(self, iteration: int = 0) -> None:
        """Write what callbacks logged; `iteration` has no effect."""
        self.logger.dump(self.num_timesteps)

    def save_state(self) -> dict[str, Any]:
        """Keep the state of the run, and return it."""
        return self._state()

    def _detach(self) -> None:
        self._context = None
        self._run_logger.write = lambda values: None

    def _state(self) -> dict[str, Any]:
        """The state of learning; that of an untrained model if there is none."""
        self._read_policy_copy()
        if self._context is not None and not self._is_current:
            self._learned, self._is_current = self._context.state(), True
        elif self._learned is None:
            envs = self._require_envs()
            self._learned = untrained_state(validated_for(self.config, envs), envs.maker, self._network)
        return self._learned

    def _refuse_while_learning(self, method: str) -> None:
        if self._context is not None:
            raise UsageError(f"`{method}` has no effect while `learn` is running; call it before or after.")

    # -- acting --------------------------------------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The policy as it is now, for inference."""
        self._read_policy_copy()
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
        refuse_reset_result(observation, self.observation_space)
        action, after = self.agent.predict_from(observation, state, episode_start, deterministic=deterministic)
        return action if isinstance(action, dict | tuple) else np.asarray(action), after

    @property
    def policy(self) -> Any:
        """The networks as a policy of Stable-Baselines3; between two `learn`, its weights may be changed."""
        if self._policy_copy is None:
            require_known(self.algo, self._state()["algo"], self.agent.policy)
            spaces = self.observation_space, self.action_space
            copy = new_policy(self.algo, self.config.recipe, *spaces, self.device, self._extractor.arguments)
            self._renew_policy_copy(copy)
            self._policy_copy = copy
        elif not self._copy_is_current:
            self._renew_policy_copy(self._policy_copy)
        return self._policy_copy.policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        """`torch.compile(model.policy)` changes nothing: unidle's own kernels act and learn."""
        if self._policy_copy is None or getattr(policy, "_orig_mod", policy) is not self._policy_copy.policy:
            raise UsageError("The policy cannot be replaced; change its weights, with load_state_dict for example.")

    def _renew_policy_copy(self, copy: PolicyCopy) -> None:
        self._copy_is_current = False  # it has no changes of the script's to be read
        copy.renew(to_sb3(self.algo, self._state()["algo"], self.agent.policy))
        self._copy_is_current = True

    def _read_policy_copy(self) -> None:
        """Take over weights that the script has changed in `policy`."""
        if self._context is not None or self._policy_copy is None or not self._copy_is_current:
            return
        changed = self._policy_copy.changed()
        if changed is not None:
            self._copy_is_current = False
            algo = self._state()["algo"]
            self._replace_state({**algo, **from_sb3(self.algo, algo, self.agent.policy, changed)})
            self._copy_is_current = True

    def _replace_state(self, algo: dict[str, Any]) -> None:
        """Set the state of the algorithm."""
        changed = {**self._state(), "algo": algo}
        self._agent = Agent(changed, self.config, self._network, self.config.engine.device)  # before: it may not fit
        self._learned = changed

    @property
    def observation_space(self) -> spaces.Space:
        """The space of observations."""
        return self.agent.obs_layout.space

    @property
    def action_space(self) -> spaces.Space:
        """The space of actions."""
        return self.agent.action_layout.space

    @property
    def seed(self) -> int:
        """That of the constructor or `set_random_seed`, or a random one."""
        return self.config.run.seed

    def set_random_seed(self, seed: int | None = None) -> None:
        """Set the seed of what is drawn from now on: weights before the first `learn`, episodes, and exploration."""
        self._refuse_while_learning("set_random_seed")
        if seed is not None:
            self.config = self.config.with_run(seed=int(seed))
            self._agent = None
            if self._envs is not None:
                self._envs.vec_env.seed(int(seed))

    def lr_schedule(self, progress_remaining: float) -> float:
        """The learning rate for the part of training that remains."""
        schedule = self._schedules.get("learning_rate")
        return float(self.learning_rate) if schedule is None else schedule(progress_remaining)

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
        """Copies of the weights, by Stable-Baselines3's names, and of the optimisers' states."""
        return parameters_of(self.algo, self._state()["algo"], self.agent.policy)

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: Any = "auto") -> None:
        """Set what `get_parameters` returned, or those of a saved model; some of them without `exact_match`."""
        self._refuse_while_learning("set_parameters")
        given = load_path_or_dict
        if not isinstance(given, dict):
            given = type(self).load(given).get_parameters()
        state = self._state()
        self._replace_state(
            with_parameters(self.algo, state["algo"], self.agent.policy, given, exact_match=exact_match)
        )
        if self._policy_copy is not None:
            self._renew_policy_copy(self._policy_copy)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: File, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """Save the model, without its replay buffer, as a zip; `exclude` may name verbose and tensorboard_log."""
        extractor = self._extractor.as_plain()
        needs = [*self._schedules, *(["policy_kwargs"] if self._network and extractor is None else [])]
        others = {"verbose": self.verbose, "tensorboard_log": self.tensorboard_log and str(self.tensorboard_log)}
        left_out = set(exclude or ()) - set(include or ())
        others = {name: value for name, value in others.items() if name not in left_out}
        others |= {"features_extractor": extractor} if extractor is not None else {}
        write_model(path, self.config, self.config.run.seed + self._starts, needs, self._state(), others)

    @classmethod
    @argument_errors()
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
        model._setup(restored.config, restored.envs, restored.schedules, restored.extractor)
        others = {**restored.others, **others}
        model.verbose, model.tensorboard_log = others.get("verbose", 0), others.get("tensorboard_log")
        model._learned, model.num_timesteps = restored.state, restored.state["step"]
        return model

    @classmethod
    def _converted(cls, arguments: dict[str, Any], weights: Weights) -> Self:
        create: Any = cls  # a subclass, whose constructor has Stable-Baselines3's arguments
        model: Self = create(**arguments)
        model._learned = convert_weights(cls.algo, model._state(), model.agent.policy, weights)
        model._agent = None
        return model
