"""A worker of `WorkerGroup`: steps its environments exactly as Gymnasium's SyncVectorEnv does.

Separate from `unidle.envs.pool.worker`, which is for training: seeds, resets, dtypes and infos differ. It starts in the
same way, and exits in the same way when its parent exits.
"""

from __future__ import annotations

import contextlib
import pickle
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

from unidle.envs.pool.signals import SEMAPHORE_BYTES, Semaphore
from unidle.envs.shared_block import map_memory
from unidle.envs.vector.infos import Columns, Infos, to_columns
from unidle.errors import as_training_error
from unidle.output import guard_output
from unidle.signals import ignore_stopping
from unidle.spaces.tree import Path, follow, rebuild, walk

# Requests to a worker; and whether its reply comes with a message in the pipe.
NOTHING, STEP, COMMAND = range(3)
NO_MESSAGE, HAS_MESSAGE = range(2)
_PARENT_CHECK_SECONDS = 1.0  # how often an idle worker checks that its parent still runs
_PIPE_BYTES = 1 << 14  # capacity of an empty pipe on any Linux
_ACTION_BYTES = 8  # the widest dtype: an environment gets its action in the dtype of the caller
Results = list[tuple[int, Any]]  # env id and result
_ACTION_DTYPES = {np.dtype(code).num: np.dtype(code) for code in "?bBhHiIlLqQefd"}


class SharedArrays:
    """Shared memory between caller and workers: semaphores, requests and replies, then one array per leaf.

    The entries of a worker's environments, and its entry of `replies`, belong to the worker from the post of its `go`
    to its own post of `ready`, and to the caller otherwise.
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
        """Create the views on `memory`; with None, only compute `nbytes`."""
        self._memory, self.nbytes = memory, SEMAPHORE_BYTES * (1 + workers)
        self.n_envs = n_envs
        if memory is not None:
            semaphores = [Semaphore(memory, SEMAPHORE_BYTES * i, initialise=new) for i in range(1 + workers)]
            self.ready, self.go = semaphores[0], semaphores[1:]
        self.requests = self._view((workers,), np.uint8)
        self.replies = self._view((workers,), np.uint8)
        self.rewards = self._view((n_envs,), np.float64)
        self.terminated = self._view((n_envs,), np.bool_)
        self.truncated = self._view((n_envs,), np.bool_)
        self.observations = {path: self._view((n_envs, *_shape(leaf)), leaf.dtype) for path, leaf in walk(observation)}
        self._actions: dict[Path, tuple[int, tuple[int, ...]]] = {}  # offset and shape [N, …] of each leaf
        for path, leaf in walk(action):
            self._actions[path] = (self.nbytes, (n_envs, *_shape(leaf)))
            self._view((n_envs, *_shape(leaf), _ACTION_BYTES), np.uint8)
        self._dtypes = self._view((len(self._actions),), np.uint8)  # of each leaf, by NumPy's type number

    def _view(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        start, count = self.nbytes, int(np.prod(shape, dtype=np.int64))
        self.nbytes = -(-(start + count * np.dtype(dtype).itemsize) // 64) * 64
        if self._memory is None:
            return np.empty(0)
        return np.ndarray(shape, dtype, self._memory, start)

    def put_actions(self, actions: Any) -> None:
        """Store the caller's actions without changing their dtype."""
        for index, (path, (start, shape)) in enumerate(self._actions.items()):
            given = np.asarray(follow(actions, path))
            if given.shape != shape or given.dtype.num not in _ACTION_DTYPES:
                raise ValueError(
                    f"actions must have shape {shape}, one per environment; got {given.dtype} {given.shape}"
                )
            self._dtypes[index] = given.dtype.num
            np.ndarray(shape, given.dtype, self._memory, start)[...] = given

    def actions(self) -> dict[Path, np.ndarray]:
        """The stored actions, each leaf [N, …]."""
        dtypes = [_ACTION_DTYPES[number] for number in self._dtypes.tolist()]
        leaves = zip(self._actions.items(), dtypes)
        return {path: np.ndarray(shape, dtype, self._memory, start) for (path, (start, shape)), dtype in leaves}


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape or ())


@dataclass
class WorkerJob:
    """What a worker needs to know to start."""

    path: list[str]  # sys.path of the parent
    factories: bytes  # of its environments, pickled: unpickled after `path` is set
    memory: int  # descriptor of the shared memory; resized when all spaces are known
    first: int  # index of its first environment
    worker: int
    mode: AutoresetMode


def main() -> None:
    """Work until the parent closes the pipe."""
    # As in training workers, the parent handles these signals. A parent-death signal is not requested: it would arrive
    # when the thread that started the workers ends, which may be a short-lived one here.
    ignore_stopping()
    guard_output()
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has exited
        job: WorkerJob = pickle.loads(pipe.recv_bytes())
        sys.path[:] = job.path
        worker = _Worker(pipe, job)
        try:
            worker.run()
        finally:
            worker.close()


class _MissingAttributeError(Exception):
    """An environment does not have an attribute, or it cannot be set; the environments have not changed."""


@contextlib.contextmanager
def _missing_attribute() -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        raise _MissingAttributeError(str(error)) from None


def _is_wrapped(env: gymnasium.Env, kind: type[gymnasium.Wrapper]) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, kind):
            return True
        env = env.env
    return False


class _Worker:
    def __init__(self, pipe: Connection, job: WorkerJob) -> None:
        self._pipe, self._job = pipe, job
        self._envs: list[gymnasium.Env] = []
        self._at = 0  # the environment being called, for error messages

    def _make(self) -> Any:
        for factory in cloudpickle.loads(self._job.factories):
            self._at = len(self._envs)
            self._envs.append(factory())
        self._ended = [False] * len(self._envs)
        first = self._envs[0]
        return [(env.observation_space, env.action_space) for env in self._envs], first.metadata, first.render_mode

    def map(self, n_envs: int, workers: int) -> None:
        """Map the shared memory, once all spaces are known."""
        env = self._envs[0]
        memory = map_memory(self._job.memory)
        self._arrays = SharedArrays(memory, env.observation_space, env.action_space, n_envs, workers)

    def run(self) -> None:
        """Create the environments, report their spaces, map the memory; then handle a request at each post of `go`."""
        self._pipe.send_bytes(self._message(self._make))
        self._pipe.send_bytes(self._message(self._command()) or _pickled(("ok", None)))
        arrays, number = self._arrays, self._job.worker
        while True:
            arrays.go[number].wait(_PARENT_CHECK_SECONDS)
            request, arrays.requests[number] = int(arrays.requests[number]), NOTHING
            if request == NOTHING:
                # Requests are set before their message is sent, so a readable pipe without a request has been closed.
                if self._pipe.poll() and arrays.requests[number] == NOTHING:
                    self._pipe.recv_bytes()  # raises EOFError
                continue
            message = self._message(self._step if request == STEP else self._command())
            arrays.replies[number] = HAS_MESSAGE if message else NO_MESSAGE
            # A message that fits into the pipe is sent before `ready`; a longer one blocks until the caller reads it.
            fits = len(message) < _PIPE_BYTES
            if message and fits:
                self._pipe.send_bytes(message)
            arrays.ready.post()
            if not fits:
                self._pipe.send_bytes(message)

    def _command(self) -> Callable[[], Any]:
        method, arguments = cloudpickle.loads(self._pipe.recv_bytes())
        return lambda: getattr(self, method)(*arguments)

    def _message(self, call: Callable[[], Any]) -> bytes:
        """The pickled result of a call, or its error; empty if the result is None."""
        try:
            value = call()
            return b"" if value is None else _pickled(("ok", value))
        except _MissingAttributeError as error:
            return _pickled(("missing", str(error)))
        except Exception as error:
            return _pickled(
                ("failure", str(as_training_error(f"Environment {self._job.first + self._at} failed", error)))
            )

    # -- requests ------------------------------------------------------------------------------------------------------

    def _step(self) -> Infos | Columns | None:
        arrays, mode, space = self._arrays, self._job.mode, self._envs[0].action_space
        actions = arrays.actions()
        infos: Infos = []
        reward: Any
        for index, env_id, env in self._numbered_envs():
            if mode is AutoresetMode.NEXT_STEP and self._ended[index]:
                observation, info = env.reset()
                reward, terminated, truncated = 0.0, False, False
            else:
                # A copy, because the environment may keep it.
                action = rebuild(space, {path: leaf[env_id].copy() for path, leaf in actions.items()})
                observation, reward, terminated, truncated, info = env.step(action)
                if mode is AutoresetMode.SAME_STEP and (terminated or truncated):
                    infos.append((env_id, {"final_obs": observation, "final_info": info}))
                    observation, info = env.reset()
            self._write(env_id, observation)
            arrays.rewards[env_id] = reward
            arrays.terminated[env_id], arrays.truncated[env_id] = terminated, truncated
            self._ended[index] = bool(terminated or truncated)
            if info:
                infos.append((env_id, info))
        return to_columns(infos, len(self._envs)) or None

    def _numbered_envs(self) -> Iterator[tuple[int, int, gymnasium.Env]]:
        """Each environment with its index in this worker and its env id."""
        for index, env in enumerate(self._envs):
            self._at = index
            yield index, self._job.first + index, env

    def _write(self, env_id: int, observation: Any) -> None:
        for path, view in self._arrays.observations.items():
            view[env_id] = follow(observation, path)

    def reset(
        self, seeds: list[int | None], options: list[dict[str, Any] | None], reset_mask: list[bool]
    ) -> Infos | None:
        """Reset the environments in `reset_mask`."""
        infos = []
        for index, env_id, env in self._numbered_envs():
            if reset_mask[index]:
                observation, info = env.reset(seed=seeds[index], options=options[index])
                self._write(env_id, observation)
                self._ended[index] = False
                if info:
                    infos.append((env_id, info))
        return infos or None

    # Each returns the result of every environment in `env_ids` with its env id.

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env_ids: list[int]) -> Results:
        """Call a method of each environment, or read an attribute."""
        found = self.get_attr(name, env_ids)  # of all of them first: a missing one raises before any is called
        results = []
        for env_id, attribute in found:
            self._at = env_id - self._job.first
            results.append((env_id, attribute(*args, **kwargs) if callable(attribute) else attribute))
        return results

    def get_attr(self, name: str, env_ids: list[int]) -> Results:
        """Read an attribute of each environment."""
        with _missing_attribute():
            return [(env_id, env.get_wrapper_attr(name)) for env_id, env in self._chosen(env_ids)]

    def has_attr(self, name: str, env_ids: list[int]) -> Results:
        """Whether each environment has an attribute."""
        return [(env_id, env.has_wrapper_attr(name)) for env_id, env in self._chosen(env_ids)]

    def set_attr(self, name: str, values: dict[int, Any], env_ids: list[int]) -> Results:
        """Set an attribute of each environment to its entry of `values`."""
        with _missing_attribute():
            return [(env_id, env.set_wrapper_attr(name, values[env_id])) for env_id, env in self._chosen(env_ids)]

    def is_wrapped(self, kind: type[gymnasium.Wrapper], env_ids: list[int]) -> Results:
        """Whether each environment has a wrapper of this class."""
        return [(env_id, _is_wrapped(env, kind)) for env_id, env in self._chosen(env_ids)]

    def _chosen(self, env_ids: list[int]) -> Iterator[tuple[int, gymnasium.Env]]:
        return ((env_id, env) for _, env_id, env in self._numbered_envs() if env_id in env_ids)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(value)  # slower, but handles objects defined in the user's script


if __name__ == "__main__":
    main()
