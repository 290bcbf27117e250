"""Meta-World: one task, or an environment that plays all tasks of a benchmark in turn.

Unlike the package, `reset(seed=s)` always starts the same episode, so that it can be replayed from its seed and
actions. Rewards are the package's V2. An episode has 500 steps and never terminates. The observation ends with the
task, one-hot.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np

from unidle.errors import UsageError

BENCHMARKS = ("MT10", "MT25", "MT50")
VERIFIED_VERSIONS = {"metaworld": "3.1.1", "mujoco": "3.3.0"}  # versions for which `fast` is verified
_GOALS = 50  # per task
_OBS_SIZE = 39  # numbers from the package; the one-hot task follows
# Unused simulators, by their arguments. One takes 20 MB, and a reset clears all of its state, so the
# environments of a process share them instead of having one per task each.
_idle: defaultdict[tuple[str, bool, str | None], list[Any]] = defaultdict(list)


class MetaWorldTask(gymnasium.Env):
    """One task of a benchmark; each episode has one of its 50 goals."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012

    def __init__(
        self,
        benchmark: str = "MT10",
        task: int | str = 0,
        seed: int = 0,
        *,
        accelerated: bool = True,
        render_mode: str | None = None,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        """`seed` draws the benchmark's goals, as `metaworld.MT10(seed)` does; `reset(seed=…)` selects one of them.

        `say` receives a message if the accelerated implementation cannot be used.
        """
        self.task, self.name = _resolve_task(benchmark, task)
        self.goals = goals_of(benchmark, seed)[self.name]
        self._simulator_args = (self.name, accelerated, render_mode)
        self._say, self.render_mode = say, render_mode
        self._one_hot = np.eye(len(task_names(benchmark)))[self.task]
        self.observation_space, self.action_space = _spaces(len(self._one_hot))
        self._simulator: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode; the seed selects its goal."""
        super().reset(seed=seed)
        if self._simulator is None:
            idle = _idle[self._simulator_args]
            self._simulator = idle.pop() if idle else _simulator(*self._simulator_args, self._say)
        self._simulator.set_task(self.goals[self.np_random.integers(_GOALS)])
        observation, info = self._simulator.reset()
        return np.concatenate((observation, self._one_hot)), {**info, "task": self.task}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Step the simulator; raises ValueError if the episode is over."""
        observation, reward, terminated, truncated, info = self._simulator.step(action)
        info["task"] = self.task
        return np.concatenate((observation, self._one_hot)), reward, terminated, truncated, info

    def render(self) -> Any:
        """Render the package's camera image."""
        return self._simulator.render()

    def close(self) -> None:
        """Return the simulator for reuse by this process."""
        simulator, self._simulator = self._simulator, None
        if simulator is not None and self.render_mode is None:
            _idle[self._simulator_args].append(simulator)
        elif simulator is not None:
            simulator.close()


class MultiTaskEnv(gymnasium.Env):
    """Environment `env_index` of `n_envs`: its episode e plays task (env_index + n_envs · e) mod the number of tasks.

    With as many environments as tasks, each keeps its task. Each `reset` starts the next episode;
    `reset(options={"env": i, "episode": e})` starts episode e of environment i.
    """

    metadata = MetaWorldTask.metadata
    is_multi_task = True  # unidle passes the env index and episode number to `reset`

    def __init__(
        self, benchmark: str = "MT10", env_index: int = 0, n_envs: int = 1, seed: int = 0, **kwargs: Any
    ) -> None:
        """`seed` and `kwargs` are those of MetaWorldTask."""
        self.names = task_names(benchmark)
        self.env_index, self.n_envs, self.episode = env_index, n_envs, -1
        self.render_mode = kwargs.get("render_mode")
        self.observation_space, self.action_space = _spaces(len(self.names))
        self._make = lambda task: MetaWorldTask(benchmark, task, seed, **kwargs)
        self._tasks: dict[int, MetaWorldTask] = {}
        self.task = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode of the next task."""
        super().reset(seed=seed)
        chosen = options or {}
        self.env_index, self.episode = chosen.get("env", self.env_index), chosen.get("episode", self.episode + 1)
        task = (self.env_index + self.n_envs * self.episode) % len(self.names)
        if task != self.task:
            self.close()
        if task not in self._tasks:
            self._tasks[task] = self._make(task)
        self.task = task
        return self._tasks[task].reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Step the open episode."""
        return self._tasks[self.task].step(action)

    def render(self) -> Any:
        """Render the package's camera image."""
        return self._tasks[self.task].render()

    def close(self) -> None:
        """Return the simulator for reuse by other environments."""
        if self.task in self._tasks:
            self._tasks[self.task].close()


def task_names(benchmark: str) -> list[str]:
    """Return the task names of a benchmark, by task index."""
    if benchmark not in BENCHMARKS:
        raise UsageError(
            f"Meta-World has no multi-task benchmark `{benchmark}`; choose one of {', '.join(BENCHMARKS)}."
        )
    return list(_classes(benchmark))


def _resolve_task(benchmark: str, task: int | str) -> tuple[int, str]:
    names = task_names(benchmark)
    if isinstance(task, str):
        if task not in names:
            near = difflib.get_close_matches(task, names, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(names)}."
            raise UsageError(f"{benchmark} has no task `{task}`; {hint}")
        task = names.index(task)
    if not 0 <= task < len(names):
        raise UsageError(f"{benchmark} has no task {task}; its tasks are 0 to {len(names) - 1}.")
    return task, names[task]


def _spaces(n_tasks: int) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """Unbounded: the package's bounds are for hidden goals, and the first observation of an episode exceeds them."""
    low, high = np.full(_OBS_SIZE + n_tasks, -np.inf), np.full(_OBS_SIZE + n_tasks, np.inf)
    low[_OBS_SIZE:], high[_OBS_SIZE:] = 0.0, 1.0
    return gymnasium.spaces.Box(low, high, dtype=np.float64), gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)


# -- the package -----------------------------------------------------------------------------------------------------


def _package(name: str = "metaworld") -> Any:
    """Import a module of the package; UsageError if MuJoCo is not the version it was made for."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise UsageError(f"Meta-World needs the package {missing}; run: pip install 'unidle[metaworld]'.") from None
    if version("mujoco") != VERIFIED_VERSIONS["mujoco"]:
        raise UsageError(
            f"Meta-World's dynamics need MuJoCo {VERIFIED_VERSIONS['mujoco']}, but {version('mujoco')} is installed; "
            "run: pip install 'unidle[metaworld]'."
        )
    return module


def unverified_version() -> str | None:
    """Return a message about the first package with an unverified version; None if there is none."""
    for package, verified in VERIFIED_VERSIONS.items():
        found = version(package)
        if found != verified:
            return (
                f"Meta-World uses the stock package, which is less than half as fast: {package} is {found}, but the "
                f"faster implementation is verified with {verified}; run: pip install 'unidle[metaworld]'."
            )
    return None


def _classes(benchmark: str) -> dict[str, type]:
    return getattr(_package("metaworld.env_dict"), f"{benchmark}_V3")


def _simulator(name: str, accelerated: bool, render_mode: str | None, say: Callable[[str], None]) -> Any:
    kind: Any = _classes("MT50")[name]
    simulator = kind(reward_function_version="v2", render_mode=render_mode)
    if accelerated and (reason := unverified_version()):  # its internals may differ too, so `fast` is not imported
        say(reason)
    elif accelerated:
        from unidle.tasks.metaworld.fast import accelerate

        accelerate(simulator, say)
    return simulator


class _NoHandReset:
    """Mixin for a task's class: its reset neither moves the hand nor computes an observation."""

    model: Any
    data: Any
    tcp_center: Any

    def _reset_hand(self, steps: int = 50) -> None:
        importlib.import_module("mujoco").mj_forward(self.model, self.data)
        self.init_tcp = self.tcp_center

    def _get_obs(self) -> np.ndarray:
        return np.zeros(_OBS_SIZE)


@cache
def goals_of(benchmark: str, seed: int) -> dict[str, list[Any]]:
    """Return the package's 50 goals of each task, drawn once per process.

    The package draws a goal in a reset, which moves the hand to its start position, twice. The draws do not depend on
    the hand, so here it is not moved; most of the remaining time is spent on loading models.
    """
    package = _package()
    if unverified_version():
        drawn = getattr(package, benchmark)(seed=seed).train_tasks
        return {name: [task for task in drawn if task.env_name == name] for name in task_names(benchmark)}
    goals: dict[str, list[Any]] = {}
    before = np.random.get_state()  # noqa: NPY002 (the package draws from this generator)
    np.random.seed(seed)  # noqa: NPY002
    try:
        for name, kind in _classes(benchmark).items():
            simulator: Any = type(kind.__name__, (_NoHandReset, kind), {})()
            simulator._freeze_rand_vec, simulator._set_task_called = False, True
            goals[name] = []
            for _ in range(_GOALS):
                simulator.reset()
                goal = {"rand_vec": simulator._last_rand_vec, "env_cls": kind, **package._MT_OVERRIDE}
                goals[name].append(package._encode_task(name, goal))
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return goals
