"""One environment that waits: a `Player` steps it on the event loop, a `StandIn` is what its slot holds instead.

The player runs ahead by all that the slot is about to ask for: a step, and the first observation of the next episode
where that step ends one, or where the environment failed and was made anew. What was raised is an answer too, and is
raised again where the slot asks.
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

CLOSING_SECONDS = 1.0  # that an environment may take to close
_Result = TypeVar("_Result")


class Player:
    """One AsyncEnv on the loop, and the answers that its slot is about to ask for."""

    def __init__(self, maker: EnvMaker, run_seed: int, index: int) -> None:
        self.env: AsyncEnv | None = None
        self._maker, self._seconds = maker, maker.deadline
        self._seed_of = partial(episode_seed, run_seed, index)
        self._steps: list[Any] = []  # outcomes of `step`, the next one last; or what was raised instead
        self._firsts: dict[int, Any] = {}  # seed → outcome of `reset`, or what was raised instead
        self.is_late = False  # it failed because its time was up
        self._is_over = False

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def make(self) -> AsyncEnv:
        """The environment, made if there is none."""
        if self._is_over:
            raise RuntimeError("The pool was closed.")
        if self.env is None:
            self.env = self._maker.awaitable()
        return self.env

    async def begin(self, episode: int) -> bool:
        """Foresee how an episode begins, or where that fails the one after; then it is False."""
        self._steps, self._firsts, self.is_late = [], {}, False
        return await self._begin(episode)

    async def play(self, action: Any, episode: int) -> None:
        """Foresee a step of an open episode."""
        self._steps, self._firsts = [], {}
        if self.env is None:  # its slot has given up, and will say why
            await self.first(self._seed_of(episode + 1))
            return
        self.is_late = False
        if await self._step(self.env, action):
            await self._begin(episode + 1)

    async def replay(self, episode: int, actions: Sequence[Any]) -> None:
        """Foresee how an open episode is come back to."""
        if not await self.begin(episode):
            return
        for action in actions:
            assert self.env is not None
            if await self._step(self.env, action):
                await self._begin(episode + 1)
                break
        self._steps.reverse()

    async def _begin(self, episode: int) -> bool:
        if await self.first(self._seed_of(episode)):
            return True
        await self.first(self._seed_of(episode + 1))
        return False

    async def _step(self, env: AsyncEnv, action: Any) -> bool:
        """True if an episode is to begin: this one ended, or the environment failed."""
        try:
            outcome = await self._within("step", env.step(action))
        except Exception as error:
            self._steps.append(error)
            await self.let_go()
            return True
        self._steps.append(outcome)
        return _has_ended(outcome)

    async def first(self, seed: int) -> bool:
        """Reset; False if that failed, and the environment is gone."""
        try:
            self._firsts[seed] = await self._within("reset", self.make().reset(seed))
        except Exception as error:
            self._firsts[seed] = error
            await self.let_go()
            return False
        return True

    async def let_go(self) -> None:
        """Close the environment, if there is one."""
        env, self.env = self.env, None
        if env is not None:
            with contextlib.suppress(Exception):  # it may well be broken
                async with asyncio.timeout(CLOSING_SECONDS):
                    await env.close()

    async def end(self) -> None:
        """Close the environment, and make no other."""
        self._is_over = True
        await self.let_go()

    async def _within(self, what: str, call: Coroutine[Any, Any, _Result]) -> _Result:
        """`call`, ended when its time is up."""
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.is_late = True
            raise TimeoutError(f"{what}() was not over after {self._seconds:g} s (--env-timeout)") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the pool is being closed
                raise
            raise RuntimeError(f"{what}() was cancelled by something that it waited for") from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{what}() raised {error!r}") from error

    # -- in the trainer's thread ---------------------------------------------------------------------------------------

    def take_step(self) -> Any:
        """The outcome of the next step that was foreseen."""
        return _given(self._steps.pop())

    def take_first(self, seed: int, thread: LoopThread) -> Any:
        """The outcome of this reset; waits for it where it was not foreseen."""
        if seed not in self._firsts:
            thread.wait(self.first(seed))
        return _given(self._firsts.pop(seed))


class StandIn(gymnasium.Env):
    """The environment as its slot has it: all answers are there already, but in rare cases."""

    def __init__(self, player: Player, env_spec: EnvSpec, thread: LoopThread) -> None:
        self.observation_space, self.action_space = env_spec.obs_layout.space, env_spec.action_layout.space
        self._player, self._thread = player, thread
        self._env = player.env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The first observation of the episode that this seed stands for."""
        assert seed is not None
        outcome = self._player.take_first(seed, self._thread)
        self._env = self._player.env  # where there was none until now
        return outcome

    def step(self, action: Any) -> Any:
        """What came of the step, whose action the player has taken already."""
        return self._player.take_step()

    def close(self) -> None:
        """Close it, but not another in its place: often it is closed already, and the next one has its own stand-in."""
        if self._env is not None and self._env is self._player.env:
            self._thread.wait(self._player.let_go())


def _has_ended(outcome: Any) -> bool:
    try:
        return bool(outcome[2] or outcome[3])
    except Exception:
        return False  # its slot will say what is wrong with it


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
