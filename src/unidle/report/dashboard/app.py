"""The dashboard's web app: two pages, their data as server-sent events, and four static files."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from unidle.report.dashboard import page
from unidle.report.dashboard.files import Runs
from unidle.report.dashboard.guard import Guard
from unidle.report.dashboard.runs import Reader, Rows, as_json

_POLL_S = 0.25  # between two reads of a run's files
_ROWS_POLL_S = 0.5  # between two reads of a folder of runs
_SHARE = 0.1  # of a core at most, since a run may be training on this machine
_SLOWEST_S = 2.0
_KEEP_ALIVE_S = 15.0  # between two comments that keep the connection open


class _Shared:
    """Data shared by several browsers, read once for all of them, in a thread."""

    def __init__(self, read: Callable[[], str | None], poll_s: float) -> None:
        self._read = read
        self._least_s = self._pause_s = poll_s
        self._lock = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self.version = 0
        self.text = ""

    async def refresh(self) -> None:
        """Read it again if the last read is old enough."""
        async with self._lock:
            if time.monotonic() - self._refreshed_at < self._pause_s / 2:
                return
            text, spent_s = await run_in_threadpool(self._timed)
            self._refreshed_at = time.monotonic()
            self._pause_s = min(_SLOWEST_S, max(self._least_s, spent_s / _SHARE))
            if text is not None:
                self.text, self.version = text, self.version + 1

    def _timed(self) -> tuple[str | None, float]:
        """Return the data and the CPU seconds that reading took."""
        began = time.thread_time()
        return self._read(), time.thread_time() - began

    async def events(self, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
        """Yield the current state and each later one."""
        sent, quiet = 0, 0.0
        while not is_closing():
            await self.refresh()
            if self.version != sent:
                sent, quiet = self.version, 0.0
                yield f"data: {self.text}\n\n"
            elif quiet >= _KEEP_ALIVE_S:
                quiet = 0.0
                yield ":\n\n"
            pause = self._pause_s
            await asyncio.sleep(pause)
            quiet += pause


class _SharedRun(_Shared):
    def __init__(self, reader: Reader) -> None:
        super().__init__(lambda: as_json(reader.view()) if reader.refresh() else None, _POLL_S)
        self.reader = reader


class _SharedRows(_Shared):
    def __init__(self, rows: Rows) -> None:
        super().__init__(self._changed, _ROWS_POLL_S)
        self._rows = rows

    def _changed(self) -> str | None:
        text = as_json(self._rows.now())
        return text if text != self.text else None


class _Site:
    """The request handlers."""

    def __init__(self, runs: Runs, is_closing: Callable[[], bool]) -> None:
        self._runs, self._is_closing = runs, is_closing
        self._rows = _SharedRows(Rows(runs))
        # A run is followed as long as a browser shows it.
        self._shared_runs: WeakValueDictionary[str, _SharedRun] = WeakValueDictionary()
        self._files = {
            "dashboard.css": (page.style_sheet(), "text/css"),
            "plotly.js": (page.plotly_script(), "text/javascript"),
            "run.js": (page.script("run"), "text/javascript"),
            "index.js": (page.script("index"), "text/javascript"),
        }
        # Part of their URLs, so that browsers may cache them: Plotly's script is 5 MB.
        self._version = hashlib.sha256("".join(text for text, _ in self._files.values()).encode()).hexdigest()[:12]

    async def index(self, request: Request) -> Response:
        return HTMLResponse(page.index_page(self._version))

    async def index_events(self, request: Request) -> Response:
        return _stream(self._rows.events(self._is_closing))

    async def run(self, request: Request) -> Response:
        await self._find(request)
        return HTMLResponse(page.run_page(request.path_params["name"], self._version))

    async def run_events(self, request: Request) -> Response:
        shared = await self._find(request)
        return _stream(shared.events(self._is_closing))

    async def spans(self, request: Request) -> Response:
        shared = await self._find(request)
        offset = request.query_params.get("at", "")
        await shared.refresh()
        known = offset.isascii() and offset.isdigit() and len(offset) < 19
        spans = await run_in_threadpool(shared.reader.spans, int(offset)) if known else None
        if spans is None:
            raise HTTPException(404, "This run has no such segment.")
        return Response(as_json(spans), media_type="application/json")

    async def file(self, request: Request) -> Response:
        text, kind = self._files.get(request.path_params["name"], ("", ""))
        if not kind:
            raise HTTPException(404, "There is no such file.")
        return Response(text, media_type=kind, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    async def _find(self, request: Request) -> _SharedRun:
        name = request.path_params["name"]
        folder = await run_in_threadpool(self._runs.find, name)
        if folder is None:
            raise HTTPException(404, "There is no such run in this folder.")
        return self._shared_runs.get(name) or self._shared_runs.setdefault(name, _SharedRun(Reader(folder)))


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(error.detail, error.status_code)


def dashboard_app(
    runs: Runs,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    port: int = 0,
    is_closing: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Create the app for a folder of runs; its event streams end once `is_closing` returns True."""
    site = _Site(runs, is_closing)
    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": site.index,
        "/events": site.index_events,
        "/run/{name}": site.run,
        "/run/{name}/events": site.run_events,
        "/run/{name}/spans": site.spans,
        "/static/{name}": site.file,
    }
    # Cookies ignore ports: two dashboards on one machine must not share one.
    guard = Middleware(Guard, host=host, token=token, cookie=f"unidle-{port}")
    routes = [Route(path, answer) for path, answer in handlers.items()]
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: _error_response})
