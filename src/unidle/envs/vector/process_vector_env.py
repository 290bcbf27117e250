"""`ProcessVectorEnv`: a `gymnasium.vector.VectorEnv` on worker processes, for use outside of unidle."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from unidle.config.machine import available_cores
from unidle.envs.shared_block import map_memory, shared_memory
from unidle.envs.vector.infos import merge_infos
from unidle.envs.vector.process_vector_worker import COMMAND, HAS_MESSAGE, STEP, SharedArrays, WorkerJob
from unidle.errors import TrainingError, UsageError
from unidle.signals import blocked
from unidle.spaces.tree import describe_path, rebuild, walk
from unidle.subprocesses import PACKAGE_PARENT

_FIXED_SIZE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_CLOSING_SECONDS = 5.0  # for all workers together to exit; the rest are killed
_POLL_SECONDS = 0.5  # how often a waiting caller checks that all workers are alive


class ProcessVectorEnv(VectorEnv):
    """Environments in a few worker processes, with exactly the results of Gymnasium's SyncVectorEnv.

    Observations, rewards and actions go through shared memory, non-empty infos through a pipe.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        workers: int | None = None,
        *,
        copy: bool = True,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """Start `workers` processes, or one per core; with copy=False the next step overwrites the observations."""
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._arrays: SharedArrays | None = None
        self.num_envs, self._copy = len(env_fns), copy
        if not env_fns:
            raise UsageError("env_fns is empty; pass at least one factory.")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        workers = min(workers or available_cores(), self.num_envs)
        starts = [int(part[0]) for part in np.array_split(np.arange(self.num_envs), workers)]
        self._spans = list(zip(starts, [*starts[1:], self.num_envs]))
        descriptor = shared_memory(0)  # resized when the spaces are known
        try:
            for number, (first, end) in enumerate(self._spans):
                factories = _pickle_factories(list(env_fns[first:end]))
                self._start(descriptor, WorkerJob(sys.path, factories, descriptor, first, number, self.autoreset_mode))
            self._set_spaces([self._receive(number) for number in range(workers)])
            self._map_memory(descriptor)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)
        self._ended = np.zeros(self.num_envs, np.bool_)

    def _start(self, memory: int, job: WorkerJob) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
            with blocked():  # until the process can ignore signals
                process = subprocess.Popen(
                    # -P: do not search the current folder, where a user's queue.py would shadow Python's.
                    [sys.executable, "-P", "-m", "unidle.envs.vector.process_vector_worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        with contextlib.suppress(ConnectionError):  # a worker that has already exited is detected when its reply is due
            self._pipes[-1].send_bytes(pickle.dumps(job))

    def _set_spaces(
        self, replies: list[tuple[list[tuple[spaces.Space, spaces.Space]], dict[str, Any], str | None]]
    ) -> None:
        """Check that all environments have the same spaces, and store them."""
        all_spaces = [pair for of_worker, _, _ in replies for pair in of_worker]
        self.single_observation_space, self.single_action_space = all_spaces[0]
        for number, pair in enumerate(all_spaces):
            if pair != all_spaces[0]:
                raise UsageError(
                    f"Environment {number} and environment 0 have different spaces; make them all the same."
                )
        for what, space in zip(("observation", "action"), all_spaces[0]):
            for path, leaf in walk(space):
                if not isinstance(leaf, _FIXED_SIZE_SPACES):
                    raise UsageError(
                        f"{describe_path(what, path)} is a {type(leaf).__name__} space, which has no fixed size; "
                        "use Gymnasium's AsyncVectorEnv with shared_memory=False for it."
                    )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**replies[0][1], "autoreset_mode": self.autoreset_mode}
        self.render_mode = replies[0][2]

    def _map_memory(self, descriptor: int) -> None:
        layout = (self.single_observation_space, self.single_action_space, self.num_envs, len(self._spans))
        os.ftruncate(descriptor, SharedArrays(None, *layout).nbytes)
        arrays = SharedArrays(map_memory(descriptor), *layout, new=True)
        for pipe in self._pipes:
            pipe.send_bytes(cloudpickle.dumps(("map", (self.num_envs, len(self._spans)))))
        for number in range(len(self._spans)):
            self._receive(number)
        self._arrays = arrays

    # -- the VectorEnv interface ---------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`; an int seeds environment i with seed + i."""
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed has {len(seed)} entries for {self.num_envs} environments")
        reset_mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            reset_mask = _checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        parts = [(list(seed[first:end]), options, reset_mask[first:end].tolist()) for first, end in self._spans]
        replies = self._call_workers("reset", parts)
        self._ended[reset_mask] = False
        return self._observations(), merge_infos(replies, self._spans, self._add_info)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take an action in each environment."""
        arrays = self._running()
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            ended_ids = np.flatnonzero(self._ended).tolist()
            raise gymnasium.error.ResetNeeded(f"The episodes of environments {ended_ids} have ended; reset them first.")
        arrays.put_actions(actions)
        with self._close_on_error():
            self._request(arrays, STEP)
            replies = self._receive_all(arrays)
        rewards, terminated, truncated = (
            arrays.rewards.copy(),
            arrays.terminated.copy(),
            arrays.truncated.copy(),
        )
        self._ended = terminated | truncated
        return self._observations(), rewards, terminated, truncated, merge_infos(replies, self._spans, self._add_info)

    def _observations(self) -> Any:
        views = self._running().observations
        leaves = {path: view.copy() for path, view in views.items()} if self._copy else views
        return rebuild(self.single_observation_space, leaves)

    def render(self) -> tuple[Any, ...]:
        """The frame of each environment."""
        return self.call("render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or read an attribute."""
        replies = self._call_workers("call", [(name, args, kwargs)] * len(self._spans))
        return tuple(result for of_worker in replies for result in of_worker)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of each environment."""
        return self.call(name)

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """A copy of each environment's random generator."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seed of each environment."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute to one value everywhere, or to the entries of a list or tuple."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"values has {len(values)} entries for {self.num_envs} environments")
        self._call_workers("set_attr", [(name, list(values[first:end])) for first, end in self._spans])

    # -- workers -----------------------------------------------------------------------------------------------------

    def _running(self) -> SharedArrays:
        if self._arrays is None:
            raise gymnasium.error.ClosedEnvironmentError("This vector environment is closed; create a new one.")
        return self._arrays

    def _call_workers(self, method: str, parts: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every worker."""
        arrays, messages = self._running(), [cloudpickle.dumps((method, part)) for part in parts]
        with self._close_on_error():
            self._request(arrays, COMMAND)
            for number, (pipe, message) in enumerate(zip(self._pipes, messages)):
                try:
                    pipe.send_bytes(message)  # after the request: the pipe may be too small for it
                except ConnectionError:
                    raise self._worker_died(number) from None
            return self._receive_all(arrays)

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Close everything on an error or Ctrl-C: some workers have taken the step and others have not."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _request(arrays: SharedArrays, request: int) -> None:
        arrays.requests[:] = request
        for go in arrays.go:
            go.post()

    def _receive_all(self, arrays: SharedArrays) -> list[Any]:
        """Wait for all workers and return the reply of each, None if it has none."""
        for _ in self._spans:
            while not arrays.ready.wait(_POLL_SECONDS):
                for number, process in enumerate(self._processes):
                    if process.poll() is not None:
                        raise self._worker_died(number)
        has_message = [reply == HAS_MESSAGE for reply in arrays.replies.tolist()]
        return [self._receive(number) if has else None for number, has in enumerate(has_message)]

    def _receive(self, number: int) -> Any:
        try:
            kind, value = pickle.loads(self._pipes[number].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._worker_died(number) from None
        if kind != "ok":
            raise TrainingError(value)
        return value

    def _worker_died(self, number: int) -> TrainingError:
        first, end = self._spans[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[number].wait(timeout=5)
        return TrainingError(
            f"The worker of environments {first} to {end - 1} exited unexpectedly (exit status "
            f"{self._processes[number].returncode}): it was killed, ran out of memory, or crashed the interpreter."
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Close the workers' pipes and wait for them to exit."""
        for pipe in self._pipes:
            pipe.close()
        for go in self._arrays.go if self._arrays else ():
            go.post()
        until = time.monotonic() + _CLOSING_SECONDS
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes, self._arrays = [], [], None

    def __del__(self) -> None:
        if not self.closed:
            self.close()


def _pickle_factories(env_fns: list[Callable[[], gymnasium.Env]]) -> bytes:
    try:
        return cloudpickle.dumps(env_fns)
    except Exception as error:
        raise UsageError(f"The environments' factories cannot be sent to worker processes ({error}).") from None


def _checked_mask(mask: Any, n_envs: int) -> np.ndarray:
    if not isinstance(mask, np.ndarray) or mask.shape != (n_envs,) or mask.dtype != np.bool_ or not mask.any():
        raise ValueError(
            f"options['reset_mask'] must be a bool array of shape ({n_envs},) with some True, not {mask!r}"
        )
    return mask
