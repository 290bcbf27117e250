"""A worker of `ProcessVectorEnv`: some of its environments, treated as Gymnasium's SyncVectorEnv treats its own.

Beside `unidle.envs.pool.worker`, which serves training: seeds, resets, dtypes and infos are another matter here. It
starts in the same way, and ends in the same way, when whoever started it goes.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from unidle.envs.block import map_memory
from unidle.envs.pool.signals import SEMAPHORE_BYTES, Semaphore
from unidle.envs.vector.infos import Columns, Infos, in_columns
from unidle.errors import failure_of
from unidle.spaces.tree import Path, follow, rebuild, walk

# What a worker is asked to do, and whether a message for the other side is in the pipe.
NOTHING, STEP, COMMAND = range(3)
QUIET, SPEAKS = range(2)
_LOOK_AROUND_SECONDS = 1.0  # how often an idle worker looks whether anyone is still there
_PIPE_BYTES = 1 << 14  # an empty pipe holds this much, on any Linux
_ACTION_BYTES = 8  # per number: an environment gets its action in the dtype the caller gave it
_ACTION_DTYPES = {np.dtype(code).num: np.dtype(code) for code in "?bBhHiIlLqQefd"}


class Exchange:
    """Shared memory between the two sides: semaphores, then what is asked and answered, then one array per leaf.

    The lines of a worker's environments, and its entry of `answers`, are the worker's from the post of its `go` to its
    own post of `ready`, and the caller's otherwise.
    """

    def __init__(
        self,
        memory: Any,
        observation: spaces.Space,
        action: spaces.Space,
        n_envs: int,
        workers: int,
        *,
        new: bool = False,
    ) -> None:
        """Lay it over `memory`; over None, only to learn how many bytes it takes: `nbytes`."""
        self._memory, self.nbytes = memory, SEMAPHORE_BYTES * (1 + workers)
        self.n_envs = n_envs
        if memory is not None:
            semaphores = [Semaphore(memory, SEMAPHORE_BYTES * i, initialise=new) for i in range(1 + workers)]
            self.ready, self.go = semaphores[0], semaphores[1:]
        self.orders = self._lay((workers,), np.uint8)
        self.answers = self._lay((workers,), np.uint8)
        self.rewards = self._lay((n_envs,), np.float64)
        self.terminated = self._lay((n_envs,), np.bool_)
        self.truncated = self._lay((n_envs,), np.bool_)
        self.observations = {path: self._lay((n_envs, *_shape(leaf)), leaf.dtype) for path, leaf in walk(observation)}
        self._actions: dict[Path, tuple[int, tuple[int, ...]]] = {}  # where the leaf lies, and [N, …]
        for path, leaf in walk(action):
            self._actions[path] = (self.nbytes, (n_envs, *_shape(leaf)))
            self._lay((n_envs, *_shape(leaf), _ACTION_BYTES), np.uint8)
        self._dtypes = self._lay((len(self._actions),), np.uint8)  # of each leaf's actions, by NumPy's number

    def _lay(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        start, count = self.nbytes, int(np.prod(shape, dtype=np.int64))
        self.nbytes = -(-(start + count * np.dtype(dtype).itemsize) // 64) * 64
        if self._memory is None:
            return np.empty(0)
        return np.ndarray(shape, dtype, self._memory, start)

    def put_actions(self, actions: Any) -> None:
        """Take the caller's actions, as they are."""
        for index, (path, (start, shape)) in enumerate(self._actions.items()):
            given = np.asarray(follow(actions, path))
            if given.shape != shape or given.dtype.num not in _ACTION_DTYPES:
                raise ValueError(
                    f"actions must have shape {shape}, one per environment; got {given.dtype} {given.shape}"
                )
            self._dtypes[index] = given.dtype.num
            np.ndarray(shape, given.dtype, self._memory, start)[...] = given

    def actions(self) -> dict[Path, np.ndarray]:
        """Each leaf [N, …] of what `put_actions` took."""
        dtypes = [_ACTION_DTYPES[number] for number in self._dtypes.tolist()]
        leaves = zip(self._actions.items(), dtypes)
        return {path: np.ndarray(shape, dtype, self._memory, start) for (path, (start, shape)), dtype in leaves}


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape or ())


@dataclass
class Task:
    """What a worker is told at its start."""

    path: list[str]  # sys.path of whoever started it
    cargo: bytes  # its environments' factories, pickled: unpickled once the path is set
    memory: int  # descriptor of the shared memory; it has its size once all spaces are known
    first: int  # number of its first environment
    worker: int
    mode: AutoresetMode


def main() -> None:
    """Serve until the other side hangs up."""
    # As in the workers of training: what such a signal means is decided where they were started. But none is asked for
    # at the parent's death: it would come at the end of the thread that started them, which may be a passing one here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # then the other side is gone
        task: Task = pickle.loads(pipe.recv_bytes())
        sys.path[:] = task.path
        worker = _Worker(pipe, task)
        try:
            worker.serve()
        finally:
            worker.close()


class _Worker:
    def __init__(self, pipe: Connection, task: Task) -> None:
        self._pipe, self._task = pipe, task
        self._envs: list[gymnasium.Env] = []
        self._at = 0  # the environment whose turn it is, for an error to name

    def _make(self) -> Any:
        for factory in cloudpickle.loads(self._task.cargo):
            self._at = len(self._envs)
            self._envs.append(factory())
        self._ended = [False] * len(self._envs)
        first = self._envs[0]
        return [(env.observation_space, env.action_space) for env in self._envs], first.metadata, first.render_mode

    def map(self, n_envs: int, workers: int) -> None:
        """All spaces are known, and the memory has its size."""
        env = self._envs[0]
        memory = map_memory(self._task.memory)
        self._exchange = Exchange(memory, env.observation_space, env.action_space, n_envs, workers)

    def serve(self) -> None:
        """Make the environments, tell their spaces, map the memory; then do what is asked for, at each post of `go`."""
        self._pipe.send_bytes(self._message(self._make))
        self._pipe.send_bytes(self._message(self._command()) or _pickled(("ok", None)))
        exchange, number = self._exchange, self._task.worker
        while True:
            exchange.go[number].wait(_LOOK_AROUND_SECONDS)
            order, exchange.orders[number] = int(exchange.orders[number]), NOTHING
            if order == NOTHING:
                # An order stands there before its message is sent, so looked for in this order there is none to miss.
                if self._pipe.poll() and exchange.orders[number] == NOTHING:
                    self._pipe.recv_bytes()  # the end of the file: EOFError
                continue
            message = self._message(self._step if order == STEP else self._command())
            exchange.answers[number] = SPEAKS if message else QUIET
            # What fits is there when it is looked for. What does not can only be sent while it is being read.
            fits = len(message) < _PIPE_BYTES
            if message and fits:
                self._pipe.send_bytes(message)
            exchange.ready.post()
            if not fits:
                self._pipe.send_bytes(message)

    def _command(self) -> Callable[[], Any]:
        method, arguments = cloudpickle.loads(self._pipe.recv_bytes())
        return lambda: getattr(self, method)(*arguments)

    def _message(self, call: Callable[[], Any]) -> bytes:
        """What came of it, pickled; nothing if that is None."""
        try:
            value = call()
            return b"" if value is None else _pickled(("ok", value))
        except Exception as error:
            return _pickled(("failure", str(failure_of(f"Environment {self._task.first + self._at} failed", error))))

    # -- what is asked for ---------------------------------------------------------------------------------------------

    def _step(self) -> Infos | Columns | None:
        exchange, mode, space = self._exchange, self._task.mode, self._envs[0].action_space
        actions = exchange.actions()
        infos: Infos = []
        reward: Any
        for index, line, env in self._in_turn():
            if mode is AutoresetMode.NEXT_STEP and self._ended[index]:
                observation, info = env.reset()
                reward, terminated, truncated = 0.0, False, False
            else:
                # A copy, which is the environment's to keep.
                action = rebuild(space, {path: leaf[line].copy() for path, leaf in actions.items()})
                observation, reward, terminated, truncated, info = env.step(action)
                if mode is AutoresetMode.SAME_STEP and (terminated or truncated):
                    infos.append((line, {"final_obs": observation, "final_info": info}))
                    observation, info = env.reset()
            self._show(line, observation)
            exchange.rewards[line] = reward
            exchange.terminated[line], exchange.truncated[line] = terminated, truncated
            self._ended[index] = bool(terminated or truncated)
            if info:
                infos.append((line, info))
        return in_columns(infos, len(self._envs)) or None

    def _in_turn(self) -> Iterator[tuple[int, int, gymnasium.Env]]:
        """Each environment with its number here and its line."""
        for index, env in enumerate(self._envs):
            self._at = index
            yield index, self._task.first + index, env

    def _show(self, line: int, observation: Any) -> None:
        for path, view in self._exchange.observations.items():
            view[line] = follow(observation, path)

    def reset(self, seeds: list[int | None], options: dict[str, Any] | None, wanted: list[bool]) -> Any:
        """Reset those that are wanted."""
        infos = []
        for index, line, env in self._in_turn():
            if wanted[index]:
                observation, info = env.reset(seed=seeds[index], options=options)
                self._show(line, observation)
                self._ended[index] = False
                if info:
                    infos.append((line, info))
        return infos or None

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """An attribute of each environment, called if it can be."""
        results = []
        for _, _, env in self._in_turn():
            found = env.get_wrapper_attr(name)
            results.append(found(*args, **kwargs) if callable(found) else found)
        return results

    def set_attr(self, name: str, values: list[Any]) -> None:
        """An attribute of each environment."""
        for index, _, env in self._in_turn():
            env.set_wrapper_attr(name, values[index])

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(value)  # slower, and takes what was defined in the user's own script


if __name__ == "__main__":
    main()
