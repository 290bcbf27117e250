"""Meta-World: one task, or a slot that plays all tasks of a benchmark in turn.

Differs from the package in what a seed does: `reset(seed=s)` begins the same episode wherever and whenever it is
called, so that it can be played again from the seed and the actions. Rewards are the package's V2, an episode is 500
steps and never terminates, and a number per task at the end of the observation says which it is.
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
PROVEN = {"metaworld": "3.1.1", "mujoco": "3.3.0"}  # the versions whose steps `metaworld_fast` was compared with
_GOALS = 50  # per task
_OBSERVED = 39  # by the package; the one-hot number of the task comes after
# Simulators that nobody is using, by how they were made. One takes 20 MB, and since a reset leaves nothing of what was
# played before, slots of a process can pass them on to each other instead of having one per task each.
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
        """`seed` draws the benchmark's goals, as `metaworld.MT10(seed)` does; `reset(seed=…)` chooses among them."""
        self.task, self.name = _which(benchmark, task)
        self.goals = goals_of(benchmark, seed)[self.name]
        self._made_as = (self.name, accelerated, render_mode)
        self._say, self.render_mode = say, render_mode
        self._one_hot = np.eye(len(task_names(benchmark)))[self.task]
        self.observation_space, self.action_space = _spaces(len(self._one_hot))
        self._simulator: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode; the seed chooses its goal."""
        super().reset(seed=seed)
        if self._simulator is None:
            idle = _idle[self._made_as]
            self._simulator = idle.pop() if idle else _simulator(*self._made_as, self._say)
        self._simulator.set_task(self.goals[self.np_random.integers(_GOALS)])
        observation, info = self._simulator.reset()
        return np.concatenate((observation, self._one_hot)), {**info, "task": self.task}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """A step of the package's; it raises if the episode is over."""
        observation, reward, terminated, truncated, info = self._simulator.step(action)
        info["task"] = self.task
        return np.concatenate((observation, self._one_hot)), reward, terminated, truncated, info

    def render(self) -> Any:
        """What a camera of the package sees."""
        return self._simulator.render()

    def close(self) -> None:
        """Leave the simulator to whoever plays this task next."""
        simulator, self._simulator = self._simulator, None
        if simulator is not None and self.render_mode is None:
            _idle[self._made_as].append(simulator)
        elif simulator is not None:
            simulator.close()


class MultiTaskEnv(gymnasium.Env):
    """Slot `slot` of `n_slots`: its episode e is one of task (slot + n_slots · e) modulo the number of tasks.

    So if there are as many slots as tasks, each keeps to its own. Episodes are counted by calls of `reset`;
    `reset(options={"env": i, "episode": e})` says which episode of which slot this is to be.
    """

    metadata = MetaWorldTask.metadata
    takes_turns = True  # unidle tells it the numbers of slot and episode

    def __init__(self, benchmark: str = "MT10", slot: int = 0, n_slots: int = 1, seed: int = 0, **kwargs: Any) -> None:
        """`seed` and `kwargs` are those of MetaWorldTask."""
        self.names = task_names(benchmark)
        self.slot, self.n_slots, self.episode = slot, n_slots, -1
        self.render_mode = kwargs.get("render_mode")
        self.observation_space, self.action_space = _spaces(len(self.names))
        self._make = lambda task: MetaWorldTask(benchmark, task, seed, **kwargs)
        self._tasks: dict[int, MetaWorldTask] = {}
        self.task = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode of the task whose turn it is."""
        super().reset(seed=seed)
        chosen = options or {}
        self.slot, self.episode = chosen.get("env", self.slot), chosen.get("episode", self.episode + 1)
        task = (self.slot + self.n_slots * self.episode) % len(self.names)
        if task != self.task:
            self.close()
        if task not in self._tasks:
            self._tasks[task] = self._make(task)
        self.task = task
        return self._tasks[task].reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """A step in the open episode."""
        return self._tasks[self.task].step(action)

    def render(self) -> Any:
        """What a camera of the package sees."""
        return self._tasks[self.task].render()

    def close(self) -> None:
        """Leave the simulator to other slots."""
        if self.task in self._tasks:
            self._tasks[self.task].close()


def task_names(benchmark: str) -> list[str]:
    """The tasks of a benchmark, in the order of their numbers."""
    if benchmark not in BENCHMARKS:
        raise UsageError(f"Meta-World has no multi-task benchmark `{benchmark}`; there are {', '.join(BENCHMARKS)}.")
    return list(_classes(benchmark))


def _which(benchmark: str, task: int | str) -> tuple[int, str]:
    names = task_names(benchmark)
    if isinstance(task, str):
        if task not in names:
            near = difflib.get_close_matches(task, names, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(names)}."
            raise UsageError(f"{benchmark} has no task `{task}`; {hint}")
        task = names.index(task)
    if not 0 <= task < len(names):
        raise UsageError(f"{benchmark} has no task {task}; its tasks are 0 to {len(names) - 1}.")
    return task, names[task]


def _spaces(n_tasks: int) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """The package's own bounds are of environments that hide the goal, and a first observation keeps to none."""
    low, high = np.full(_OBSERVED + n_tasks, -np.inf), np.full(_OBSERVED + n_tasks, np.inf)
    low[_OBSERVED:], high[_OBSERVED:] = 0.0, 1.0
    return gymnasium.spaces.Box(low, high, dtype=np.float64), gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)


# -- the package -----------------------------------------------------------------------------------------------------


def _package(name: str = "metaworld") -> Any:
    """A module of the package, with the MuJoCo that it was made for."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise UsageError(f"Meta-World needs the package {missing}; run: pip install unidle[metaworld].") from None
    if version("mujoco") != PROVEN["mujoco"]:
        raise UsageError(
            f"Meta-World moves as published only with MuJoCo {PROVEN['mujoco']}, and {version('mujoco')} is installed; "
            "run: pip install unidle[metaworld]."
        )
    return module


def unproven() -> str | None:
    """A sentence about the package whose version was not compared bit by bit, if there is one."""
    for package, proven in PROVEN.items():
        found = version(package)
        if found != proven:
            return (
                f"Meta-World is stepped by the stock package, at less than half the speed: {package} is {found}, and "
                f"the faster way was proven with {proven}; run: pip install unidle[metaworld]."
            )
    return None


def _classes(benchmark: str) -> dict[str, type]:
    return getattr(_package("metaworld.env_dict"), f"{benchmark}_V3")


def _simulator(name: str, accelerated: bool, render_mode: str | None, say: Callable[[str], None]) -> Any:
    kind: Any = _classes("MT50")[name]
    simulator = kind(reward_function_version="v2", render_mode=render_mode)
    if accelerated and (why_not := unproven()):  # then its insides may be others too, and are not even imported
        say(why_not)
    elif accelerated:
        from unidle.tasks.metaworld.fast import accelerate

        accelerate(simulator, say)
    return simulator


class _HandStays:
    """In front of a task's class: a reset that leaves the hand where it is, and looks at nothing."""

    model: Any
    data: Any
    tcp_center: Any

    def _reset_hand(self, steps: int = 50) -> None:
        importlib.import_module("mujoco").mj_forward(self.model, self.data)
        self.init_tcp = self.tcp_center

    def _get_obs(self) -> np.ndarray:
        return np.zeros(_OBSERVED)


@cache
def goals_of(benchmark: str, seed: int) -> dict[str, list[Any]]:
    """50 goals for each task, those of the package; drawn once in a process.

    The package draws a goal by a reset, in which the hand travels to its place, twice. No draw hangs on where the hand
    is, so here it stays, and most of what is left of the time is the reading of models.
    """
    package = _package()
    if unproven():
        drawn = getattr(package, benchmark)(seed=seed).train_tasks
        return {name: [task for task in drawn if task.env_name == name] for name in task_names(benchmark)}
    goals: dict[str, list[Any]] = {}
    before = np.random.get_state()  # noqa: NPY002 (the package draws from this generator)
    np.random.seed(seed)  # noqa: NPY002
    try:
        for name, kind in _classes(benchmark).items():
            simulator: Any = type(kind.__name__, (_HandStays, kind), {})()
            simulator._freeze_rand_vec, simulator._set_task_called = False, True
            goals[name] = []
            for _ in range(_GOALS):
                simulator.reset()
                goal = {"rand_vec": simulator._last_rand_vec, "env_cls": kind, **package._MT_OVERRIDE}
                goals[name].append(package._encode_task(name, goal))
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return goals
