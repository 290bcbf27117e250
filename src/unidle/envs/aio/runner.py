"""One AsyncEnv in two halves: `AsyncEnvRunner` calls it on the event loop, `EnvProxy` hands the results to its slot.

The runner prefetches the calls that the slot is about to make: a step, and the reset after it if the episode ends or
the environment fails. An exception is stored like a result and raised again when the slot makes the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium

from unidle.envs.aio.async_env import AsyncEnv
from unidle.envs.aio.loop_thread import LoopThread
from unidle.envs.make import EnvMaker
from unidle.envs.pool.slot import episode_seed
from unidle.envs.spec import EnvSpec

CLOSING_SECONDS = 1.0  # for an environment to close
_Result = TypeVar("_Result")


class AsyncEnvRunner:
    """One AsyncEnv on the loop, and the prefetched results of its calls."""

    def __init__(self, maker: EnvMaker, run_seed: int, index: int) -> None:
        self.env: AsyncEnv | None = None
        self._maker, self._seconds = maker, maker.step_timeout
        self._seed_of = partial(episode_seed, run_seed, index)
        self._steps: list[Any] = []  # results of `step`, or exceptions, in reverse order
        self._resets: dict[int, Any] = {}  # seed → result of `reset`, or exception
        self.timed_out = False  # the last failure was a timeout
        self._is_closed = False

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def make(self) -> AsyncEnv:
        """Return the environment; create it if there is none."""
        if self._is_closed:
            raise RuntimeError("The pool was closed.")
        if self.env is None:
            self.env = self._maker.async_env()
        return self.env

    async def begin(self, episode: int) -> bool:
        """Prefetch the reset of an episode; if it fails, that of the next one, and return False."""
        self._steps, self._resets, self.timed_out = [], {}, False
        return await self._begin(episode)

    async def step(self, action: Any, episode: int) -> None:
        """Prefetch a step of an open episode."""
        self._steps, self._resets = [], {}
        if self.env is None:  # its slot is marked as failed and reports the reason
            await self.reset(self._seed_of(episode + 1))
            return
        self.timed_out = False
        if await self._step_env(self.env, action):
            await self._begin(episode + 1)

    async def replay(self, episode: int, actions: Sequence[Any]) -> None:
        """Prefetch the replay of an open episode."""
        if not await self.begin(episode):
            return
        for action in actions:
            assert self.env is not None
            if await self._step_env(self.env, action):
                await self._begin(episode + 1)
                break
        self._steps.reverse()

    async def _begin(self, episode: int) -> bool:
        if await self.reset(self._seed_of(episode)):
            return True
        await self.reset(self._seed_of(episode + 1))
        return False

    async def _step_env(self, env: AsyncEnv, action: Any) -> bool:
        """Return True if a reset must follow: the episode ended or the environment failed."""
        try:
            outcome = await self._with_timeout("step", env.step(action))
        except Exception as error:
            self._steps.append(error)
            await self.close_env()
            return True
        self._steps.append(outcome)
        return _has_ended(outcome)

    async def reset(self, seed: int) -> bool:
        """Prefetch a reset; close the environment and return False if it fails."""
        try:
            self._resets[seed] = await self._with_timeout("reset", self.make().reset(seed=seed))
        except Exception as error:
            self._resets[seed] = error
            await self.close_env()
            return False
        return True

    async def close_env(self) -> None:
        """Close the environment, if there is one."""
        env, self.env = self.env, None
        if env is not None:
            with contextlib.suppress(Exception):  # it may be broken
                async with asyncio.timeout(CLOSING_SECONDS):
                    await env.close()

    async def close(self) -> None:
        """Close the environment; no other is created."""
        self._is_closed = True
        await self.close_env()

    async def _with_timeout(self, what: str, call: Coroutine[Any, Any, _Result]) -> _Result:
        """Await `call`; cancel it after the timeout."""
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.timed_out = True
            raise TimeoutError(f"{what}() did not finish within {self._seconds:g} s (--env-timeout)") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the pool is being closed
                raise
            raise RuntimeError(f"{what}() was cancelled by a task that it awaited") from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{what}() raised {error!r}") from error

    # -- in the trainer's thread ---------------------------------------------------------------------------------------

    def take_step(self) -> Any:
        """Return the next prefetched step."""
        return _unwrap(self._steps.pop())

    def take_reset(self, seed: int, thread: LoopThread) -> Any:
        """Return the prefetched reset with this seed; run it now if it was not prefetched."""
        if seed not in self._resets:
            thread.wait(self.reset(seed))
        return _unwrap(self._resets.pop(seed))


class EnvProxy(gymnasium.Env):
    """The gymnasium.Env in the slot: returns prefetched results, and waits only in rare cases."""

    def __init__(self, runner: AsyncEnvRunner, env_spec: EnvSpec, thread: LoopThread) -> None:
        self.observation_space, self.action_space = env_spec.obs_layout.space, env_spec.action_layout.space
        self._runner, self._thread = runner, thread
        self._env = runner.env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return the first observation of the episode with this seed."""
        assert seed is not None
        outcome = self._runner.take_reset(seed, self._thread)
        self._env = self._runner.env  # it may have been created by the reset
        return outcome

    def step(self, action: Any) -> Any:
        """Return the result of the step; the runner already has the action."""
        return self._runner.take_step()

    def close(self) -> None:
        """Close the environment unless it was replaced: the new one has its own proxy."""
        if self._env is not None and self._env is self._runner.env:
            self._thread.wait(self._runner.close_env())


def _has_ended(outcome: Any) -> bool:
    try:
        return bool(outcome[2] or outcome[3])
    except Exception:
        return False  # its slot reports what is wrong with it


def _unwrap(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result
