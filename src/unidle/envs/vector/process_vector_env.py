"""Worker processes as a `gymnasium.vector.VectorEnv`, for programs that are not unidle's."""

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
from unidle.envs.block import map_memory, shared_memory
from unidle.envs.vector.infos import put_together
from unidle.envs.vector.process_vector_worker import COMMAND, SPEAKS, STEP, Exchange, Task
from unidle.errors import TrainingError, UsageError
from unidle.spaces.tree import describe_path, rebuild, walk
from unidle.subprocesses import PACKAGE_PARENT

_FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_CLOSING_SECONDS = 5.0  # that all workers together have to end by themselves
_LOOK_AROUND_SECONDS = 0.5  # how often it is looked whether all workers are still there


class ProcessVectorEnv(VectorEnv):
    """Environments in a few worker processes, step for step what Gymnasium's SyncVectorEnv makes of them.

    Observations, rewards and actions go through shared memory, infos through a pipe where there are any.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        workers: int | None = None,
        *,
        copy: bool = True,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """`workers` processes, or one per core; without `copy`, observations are overwritten by the next step."""
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._exchange: Exchange | None = None
        self.num_envs, self._copy = len(env_fns), copy
        if not env_fns:
            raise UsageError("There is no environment in env_fns; give at least one factory.")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        workers = min(workers or available_cores(), self.num_envs)
        starts = [int(part[0]) for part in np.array_split(np.arange(self.num_envs), workers)]
        self._spans = list(zip(starts, [*starts[1:], self.num_envs]))
        descriptor = shared_memory(0)  # it grows once the spaces are known
        try:
            for number, (first, end) in enumerate(self._spans):
                cargo = _packed(list(env_fns[first:end]))
                self._start(descriptor, Task(sys.path, cargo, descriptor, first, number, self.autoreset_mode))
            self._agree([self._answer(number) for number in range(workers)])
            self._share(descriptor)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)
        self._ended = np.zeros(self.num_envs, np.bool_)

    def _start(self, memory: int, task: Task) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
            process = subprocess.Popen(
                # -P: the current folder is not searched, so that a queue.py there does not stand in for Python's own.
                [sys.executable, "-P", "-m", "unidle.envs.vector.process_vector_worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        with contextlib.suppress(ConnectionError):  # one that is gone already is found when its answer is due
            self._pipes[-1].send_bytes(pickle.dumps(task))

    def _agree(self, told: list[tuple[list[tuple[spaces.Space, spaces.Space]], dict[str, Any], str | None]]) -> None:
        """Take the first environment's spaces for all, if they are the same."""
        all_spaces = [pair for of_worker, _, _ in told for pair in of_worker]
        self.single_observation_space, self.single_action_space = all_spaces[0]
        for number, pair in enumerate(all_spaces):
            if pair != all_spaces[0]:
                raise UsageError(f"Environment {number} has other spaces than environment 0; make them all the same.")
        for what, space in zip(("observation", "action"), all_spaces[0]):
            for path, leaf in walk(space):
                if not isinstance(leaf, _FIXED):
                    raise UsageError(
                        f"{describe_path(what, path)} is a {type(leaf).__name__} space, which has no fixed size; "
                        "use Gymnasium's AsyncVectorEnv with shared_memory=False for it."
                    )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**told[0][1], "autoreset_mode": self.autoreset_mode}
        self.render_mode = told[0][2]

    def _share(self, descriptor: int) -> None:
        layout = (self.single_observation_space, self.single_action_space, self.num_envs, len(self._spans))
        os.ftruncate(descriptor, Exchange(None, *layout).nbytes)
        exchange = Exchange(map_memory(descriptor), *layout, new=True)
        for pipe in self._pipes:
            pipe.send_bytes(cloudpickle.dumps(("map", (self.num_envs, len(self._spans)))))
        for number in range(len(self._spans)):
            self._answer(number)
        self._exchange = exchange

    # -- what a vector environment does ----------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`; an int seeds environment i with seed + i."""
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed has {len(seed)} entries for {self.num_envs} environments")
        wanted = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            wanted = _checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        parts = [(list(seed[first:end]), options, wanted[first:end].tolist()) for first, end in self._spans]
        told = self._ask("reset", parts)
        self._ended[wanted] = False
        return self._observations(), put_together(told, self._spans, self._add_info)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take an action in each environment."""
        exchange = self._running()
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            over = np.flatnonzero(self._ended).tolist()
            raise gymnasium.error.ResetNeeded(f"The episodes of environments {over} are over; reset them first.")
        exchange.put_actions(actions)
        with self._all_or_none():
            self._order(exchange, STEP)
            told = self._answers(exchange)
        rewards, terminated, truncated = (
            exchange.rewards.copy(),
            exchange.terminated.copy(),
            exchange.truncated.copy(),
        )
        self._ended = terminated | truncated
        return self._observations(), rewards, terminated, truncated, put_together(told, self._spans, self._add_info)

    def _observations(self) -> Any:
        views = self._running().observations
        leaves = {path: view.copy() for path, view in views.items()} if self._copy else views
        return rebuild(self.single_observation_space, leaves)

    def render(self) -> tuple[Any, ...]:
        """What each environment renders."""
        return self.call("render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute of each environment, called with these arguments if it can be."""
        told = self._ask("call", [(name, args, kwargs)] * len(self._spans))
        return tuple(result for of_worker in told for result in of_worker)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment."""
        return self.call(name)

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """Each environment's stream, a copy of it."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """Each environment's seed."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: to one value everywhere, or to the entries of a list or tuple."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"values has {len(values)} entries for {self.num_envs} environments")
        self._ask("set_attr", [(name, list(values[first:end])) for first, end in self._spans])

    # -- workers -----------------------------------------------------------------------------------------------------

    def _running(self) -> Exchange:
        if self._exchange is None:
            raise gymnasium.error.ClosedEnvironmentError("This vector environment is closed; make a new one.")
        return self._exchange

    def _ask(self, method: str, parts: list[tuple[Any, ...]]) -> list[Any]:
        """Have every worker call a method of its own."""
        exchange, messages = self._running(), [cloudpickle.dumps((method, part)) for part in parts]
        with self._all_or_none():
            self._order(exchange, COMMAND)
            for number, (pipe, message) in enumerate(zip(self._pipes, messages)):
                try:
                    pipe.send_bytes(message)  # after the order: it may be too long for the pipe
                except ConnectionError:
                    raise self._lost(number) from None
            return self._answers(exchange)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """End all workers if one fails, or at Ctrl-C: some of them have done what was ordered, and others have not."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _order(exchange: Exchange, order: int) -> None:
        exchange.orders[:] = order
        for go in exchange.go:
            go.post()

    def _answers(self, exchange: Exchange) -> list[Any]:
        """What each worker has to say when it is done, if anything."""
        for _ in self._spans:
            while not exchange.ready.wait(_LOOK_AROUND_SECONDS):
                for number, process in enumerate(self._processes):
                    if process.poll() is not None:
                        raise self._lost(number)
        speaking = [answer == SPEAKS for answer in exchange.answers.tolist()]
        return [self._answer(number) if speaks else None for number, speaks in enumerate(speaking)]

    def _answer(self, number: int) -> Any:
        try:
            kind, value = pickle.loads(self._pipes[number].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._lost(number) from None
        if kind != "ok":
            raise TrainingError(value)
        return value

    def _lost(self, number: int) -> TrainingError:
        first, end = self._spans[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[number].wait(timeout=5)
        return TrainingError(
            f"The worker of environments {first} to {end - 1} ended unexpectedly (exit status "
            f"{self._processes[number].returncode}): it was killed, ran out of memory, or crashed the interpreter."
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Hang up on the workers and wait for them to end."""
        for pipe in self._pipes:
            pipe.close()
        for go in self._exchange.go if self._exchange else ():
            go.post()
        until = time.monotonic() + _CLOSING_SECONDS
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes, self._exchange = [], [], None

    def __del__(self) -> None:
        if not self.closed:
            self.close()


def _packed(env_fns: list[Callable[[], gymnasium.Env]]) -> bytes:
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
