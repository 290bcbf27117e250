"""An event loop in its own thread, to which other threads submit coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_CLOSING_SECONDS = 2.0  # for remaining tasks to finish
_CANCEL_CHECK_SECONDS = 0.2


class LoopThread:
    """An event loop that runs in its own thread until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_closing = False
        # A daemon: a program that exits without `close` does not wait for requests.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, _Result], seconds: float | None = None) -> _Result:
        """Run a coroutine on the loop and wait for it; TimeoutError after `seconds`."""
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()  # also on Ctrl-C
            raise

    def wait_unless_cancelled(self, is_cancelled: Callable[[], bool], work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop and wait for it; EOFError as soon as `is_cancelled()`."""
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            while not future.done():
                futures.wait([future], _CANCEL_CHECK_SECONDS)
                if is_cancelled():
                    raise EOFError
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel remaining tasks, end the thread and close the loop; a second call does nothing."""
        if self._is_closing:
            return
        with contextlib.suppress(TimeoutError, CancelledError):
            self.wait(self._shut_down(), 2 * _CLOSING_SECONDS)
        self._is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():  # otherwise a task blocks it and cannot be interrupted
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_closing:
            # A task that calls sys.exit stops the loop; run it again for the other tasks.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_SECONDS)
        await self.loop.shutdown_asyncgens()
        for _ in range(3):  # connections close an iteration or two after the request
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.loop.shutdown_default_executor(), _CLOSING_SECONDS)
