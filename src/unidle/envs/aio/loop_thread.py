"""An event loop in a thread of its own, that others hand work to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_CLOSING_SECONDS = 2.0  # for what is left on the loop to end
_LOOK_UP_SECONDS = 0.2  # how often to ask whether something is still wanted


class LoopThread:
    """Runs from when it is made until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_closing = False
        # A daemon: a program that ends without `close` does not wait for pages.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, _Result], seconds: float | None = None) -> _Result:
        """Do this on the loop, and wait for it; TimeoutError after `seconds`."""
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()  # Ctrl-C: nobody wants it any more
            raise

    def wait_unless(self, is_unwanted: Callable[[], bool], work: Coroutine[Any, Any, _Result]) -> _Result:
        """Do this on the loop, and wait for it; EOFError as soon as nobody wants it any more."""
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            while not future.done():
                futures.wait([future], _LOOK_UP_SECONDS)
                if is_unwanted():
                    raise EOFError
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is left, end the thread and close the loop; a second time does nothing."""
        if self._is_closing:
            return
        with contextlib.suppress(TimeoutError, CancelledError):
            self.wait(self._wind_up(), 2 * _CLOSING_SECONDS)
        self._is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():  # else something on it blocks, and cannot be ended
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_closing:
            # A task that calls sys.exit stops the loop, and is over with that; the others go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    async def _wind_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_SECONDS)
        await self.loop.shutdown_asyncgens()
        for _ in range(3):  # connections are closed by the loop, a turn or two after they are told to
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.loop.shutdown_default_executor(), _CLOSING_SECONDS)
