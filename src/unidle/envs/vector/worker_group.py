"""Worker processes that step environments for another program, behind `ProcessVectorEnv` and SB3's interface.

One request at a time is with all workers: `request_…` sends it, `wait` returns their replies. A worker's entries of the
shared arrays belong to it in between.
"""

from __future__ import annotations

import contextlib
import multiprocessing
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
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, CustomSpaceError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from unidle.config.machine import available_cores
from unidle.envs.shared_block import map_memory, shared_memory
from unidle.envs.vector.process_vector_worker import COMMAND, HAS_MESSAGE, STEP, SharedArrays, WorkerJob
from unidle.errors import TrainingError, UsageError
from unidle.signals import blocked
from unidle.spaces.tree import describe_path, walk
from unidle.subprocesses import PACKAGE_PARENT

_FIXED_SIZE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_CLOSING_SECONDS = 5.0  # for all workers together to exit; the rest are killed
_POLL_SECONDS = 0.5  # how often a waiting caller checks that all workers are alive


class NoFixedSizeError(UsageError, CustomSpaceError, ValueError):
    """A space whose values do not fit into shared memory."""


class WorkerGroup:
    """Environments in a few worker processes, and their pending request."""

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env]], workers: int | None, mode: AutoresetMode
    ) -> None:
        """Start `workers` processes, or one per core; `map_memory` is needed before the first request."""
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._arrays: SharedArrays | None = None
        self._left = 0  # workers that have not finished the pending request
        self.pending: str | None = None  # the name of the request
        self.n_envs = len(env_fns)
        if not env_fns:
            raise UsageError("env_fns is empty; pass at least one factory.")
        workers = min(workers or available_cores(), self.n_envs)
        starts = [int(part[0]) for part in np.array_split(np.arange(self.n_envs), workers)]
        self.spans = list(zip(starts, [*starts[1:], self.n_envs]))  # env ids of each worker: (first, end)
        self._descriptor = shared_memory(0)  # resized when the spaces are known
        try:
            for number, (first, end) in enumerate(self.spans):
                factories = _pickle_factories(list(env_fns[first:end]))
                self._start(WorkerJob(sys.path, factories, self._descriptor, first, number, mode))
            replies = [self._checked(self._receive(number)) for number in range(workers)]
        except BaseException:
            self.close()
            raise
        self.spaces: list[tuple[spaces.Space, spaces.Space]] = [pair for pairs, _, _ in replies for pair in pairs]
        self.metadata: dict[str, Any] = replies[0][1]
        self.render_mode: str | None = replies[0][2]

    def _start(self, job: WorkerJob) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
            with blocked():  # until the process can ignore signals
                process = subprocess.Popen(
                    # -P: do not search the current folder, where a user's queue.py would shadow Python's.
                    [sys.executable, "-P", "-m", "unidle.envs.vector.process_vector_worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), job.memory),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        with contextlib.suppress(ConnectionError):  # a worker that has already exited is detected when its reply is due
            self._pipes[-1].send_bytes(pickle.dumps(job))

    def map_memory(self) -> None:
        """Map the shared memory; all environments have spaces of the same shapes and dtypes."""
        for what, space in zip(("observation", "action"), self.spaces[0]):
            for path, leaf in walk(space):
                if not isinstance(leaf, _FIXED_SIZE_SPACES):
                    raise NoFixedSizeError(
                        f"{describe_path(what, path)} is a {type(leaf).__name__} space, which has no fixed size; "
                        "use Gymnasium's AsyncVectorEnv with shared_memory=False for it."
                    )
        layout = (*self.spaces[0], self.n_envs, len(self.spans))
        os.ftruncate(self._descriptor, SharedArrays(None, *layout).nbytes)
        arrays = SharedArrays(map_memory(self._descriptor), *layout, new=True)
        for pipe in self._pipes:
            pipe.send_bytes(cloudpickle.dumps(("map", (self.n_envs, len(self.spans)))))
        for number in range(len(self.spans)):
            self._checked(self._receive(number))
        self._arrays = arrays
        self._close_descriptor()

    @property
    def arrays(self) -> SharedArrays:
        """The shared memory; ClosedEnvironmentError after `close`."""
        if self._arrays is None:
            raise ClosedEnvironmentError("This vector environment is closed; create a new one.")
        return self._arrays

    # -- requests ------------------------------------------------------------------------------------------------------

    def request_step(self, actions: Any) -> None:
        """Step all environments."""
        arrays = self._idle_arrays("step_async")
        arrays.put_actions(actions)
        self._post(arrays, STEP, "step")

    def request_reset(
        self, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None], reset_mask: np.ndarray
    ) -> None:
        """Reset the environments in `reset_mask`."""
        per_env = (list(seeds), list(options), reset_mask.tolist())
        parts = [tuple(part[first:end] for part in per_env) for first, end in self.spans]
        self._request_command("reset_async", "reset", "reset", parts)

    def request_call(self, method: str, *arguments: Any, chosen: Sequence[int] | None = None) -> None:
        """Call a method of the worker for all environments, or for the `chosen` ones."""
        caller = "call_async" if method == "call" else method
        self._request_command(caller, "call", method, [(*arguments, ids) for ids in self._ids_of(chosen)])

    def call(self, method: str, *arguments: Any, chosen: Sequence[int] | None = None) -> list[Any]:
        """Call a method of the worker, and return its result for each environment, or for the `chosen` ones, in order.

        A missing attribute raises AttributeError and changes nothing else.
        """
        self.request_call(method, *arguments, chosen=chosen)
        found = self.call_results()
        return [found[env_id] for env_id in (range(self.n_envs) if chosen is None else chosen)]

    def call_results(self, seconds: float | None = None) -> dict[int, Any]:
        """The results of the `request_call` before, by env id."""
        return dict(pair for part in self.wait(seconds) for pair in part or ())

    def _ids_of(self, chosen: Sequence[int] | None) -> list[list[int]]:
        """The env ids of each worker."""
        ids = range(self.n_envs) if chosen is None else sorted(set(chosen))
        return [[env_id for env_id in ids if first <= env_id < end] for first, end in self.spans]

    def _request_command(self, caller: str, request: str, method: str, parts: Sequence[tuple[Any, ...]]) -> None:
        arrays = self._idle_arrays(caller)
        messages = [cloudpickle.dumps((method, part)) for part in parts]
        self._post(arrays, COMMAND, request)
        with self._close_on_error():
            for number, (pipe, message) in enumerate(zip(self._pipes, messages)):
                try:
                    pipe.send_bytes(message)  # after the request: the pipe may be too small for it
                except ConnectionError:
                    raise self._worker_died(number) from None

    def _idle_arrays(self, caller: str) -> SharedArrays:
        arrays = self.arrays
        if self.pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{caller}` while waiting for a pending call to `{self.pending}` to complete.", self.pending
            )
        return arrays

    def _post(self, arrays: SharedArrays, kind: int, request: str) -> None:
        self.pending, self._left = request, len(self.spans)
        arrays.requests[:] = kind
        for go in arrays.go:
            go.post()

    # -- replies -------------------------------------------------------------------------------------------------------

    def expect(self, request: str) -> None:
        """NoAsyncCallError unless this request is pending; ClosedEnvironmentError after `close`."""
        if self._arrays is not None and self.pending != request:
            raise NoAsyncCallError(f"Calling `{request}_wait` without any prior call to `{request}_async`.", request)

    def wait(self, seconds: float | None = None) -> list[Any]:
        """Wait for all workers and return the reply of each, None if it has none.

        TimeoutError after `seconds`; the request stays pending.
        """
        with self._close_on_error():
            if not self._all_finished(seconds):
                timed_out = self.pending
            else:
                timed_out, self.pending = None, None
                has_message = [reply == HAS_MESSAGE for reply in self.arrays.replies.tolist()]
                # All are read before any raises: a missing attribute leaves the pipes empty.
                replies = [self._receive(number) if has else None for number, has in enumerate(has_message)]
                values = [reply and self._checked(reply) for reply in replies]
        if timed_out is not None:
            raise multiprocessing.TimeoutError(
                f"The call to `{timed_out}_wait` has timed out after {seconds} second(s)."
            )
        return values

    def _all_finished(self, seconds: float | None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        while self._left:
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, max(0.0, until - time.monotonic()))
            if self.arrays.ready.wait(left):
                self._left -= 1
                continue
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise self._worker_died(number)
            if until is not None and time.monotonic() >= until:
                return False
        return True

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Close everything on an error or Ctrl-C: some workers have taken the step and others have not."""
        try:
            yield
        except AttributeError:
            raise
        except BaseException:
            self.close()
            raise

    def _receive(self, number: int) -> tuple[str, Any]:
        try:
            reply: tuple[str, Any] = pickle.loads(self._pipes[number].recv_bytes())
            return reply
        except (EOFError, ConnectionError):
            raise self._worker_died(number) from None

    @staticmethod
    def _checked(reply: tuple[str, Any]) -> Any:
        kind, value = reply
        if kind == "missing":
            raise AttributeError(value)
        if kind != "ok":
            raise TrainingError(value)
        return value

    def _worker_died(self, number: int) -> TrainingError:
        first, end = self.spans[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[number].wait(timeout=5)
        return TrainingError(
            f"The worker of environments {first} to {end - 1} exited unexpectedly (exit status "
            f"{self._processes[number].returncode}): it was killed, ran out of memory, or crashed the interpreter."
        )

    def close(self, seconds: float = _CLOSING_SECONDS) -> None:
        """Close the workers' pipes and wait for them to exit; may be repeated."""
        self._close_descriptor()
        for pipe in self._pipes:
            pipe.close()
        for go in self._arrays.go if self._arrays else ():
            go.post()
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes, self._arrays, self.pending = [], [], None, None

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _pickle_factories(env_fns: list[Callable[[], gymnasium.Env]]) -> bytes:
    try:
        return cloudpickle.dumps(env_fns)
    except Exception as error:
        raise UsageError(f"The environments' factories cannot be sent to worker processes ({error}).") from None
