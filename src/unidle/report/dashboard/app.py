"""The dashboard's web app: its pages, their data as server-sent events, and their static files."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from unidle.report.dashboard import page
from unidle.report.dashboard.folders import GROUP, PACK, RUN, SWEEP, Entry, Runs
from unidle.report.dashboard.guard import Guard
from unidle.report.dashboard.packs import PackReader
from unidle.report.dashboard.rows import Rows
from unidle.report.dashboard.runs import Reader, as_json
from unidle.report.dashboard.several import SeveralReader
from unidle.report.dashboard.sweeps import SweepReader
from unidle.report.dashboard.view import View

_POLL_S = 0.25  # between two reads of a run's files
_ROWS_POLL_S = 0.5  # between two reads of a folder of runs
_SHARE = 0.1  # of a core at most, since a run may be training on this machine
_SLOWEST_S = 2.0
_MOST_COMPARED = 24
_PAGES = {RUN: "run", GROUP: "several", SWEEP: "sweep", PACK: "pack"}  # kind → page
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


class _Reader(Protocol):
    """Follows what a page shows."""

    def refresh(self) -> bool:
        """Read what is new; returns whether anything is."""

    def view(self) -> View:
        """Return what the page draws."""


class _SharedPage(_Shared):
    """What a page shows, as long as a browser shows it."""

    def __init__(self, reader: _Reader, poll_s: float) -> None:
        super().__init__(lambda: as_json(reader.view()) if reader.refresh() else None, poll_s)
        self.reader = reader


class _SharedRows(_Shared):
    """The rows of the first page."""

    def __init__(self, runs: Runs, packs: Runs | None) -> None:
        super().__init__(self._changed, _ROWS_POLL_S)
        self._runs, self._packs, self._rows, self._pack_rows = runs, packs, Rows(), Rows()

    def _changed(self) -> str | None:
        rows = self._rows.of(list(self._runs.entries()))
        if self._packs is not None:
            rows += self._pack_rows.of([entry for entry in self._packs.entries() if entry.kind == PACK])
        text = as_json(rows)
        return text if text != self.text else None


class _Site:
    """The request handlers."""

    def __init__(self, runs: Runs, packs: Runs | None, is_closing: Callable[[], bool]) -> None:
        self._runs, self._packs, self._is_closing = runs, packs, is_closing
        self._rows = _SharedRows(runs, packs)
        # What is followed as long as a browser shows it, by its address.
        self._shared_pages: WeakValueDictionary[str, _SharedPage] = WeakValueDictionary()
        self._files = {
            "dashboard.css": (page.style_sheet(), "text/css"),
            "plotly.js": (page.plotly_script(), "text/javascript"),
            **{f"{name}.js": (page.script(name), "text/javascript") for name in page.SCRIPTS},
        }
        # Part of their URLs, so that browsers may cache them: Plotly's script is 5 MB.
        self._version = hashlib.sha256("".join(text for text, _ in self._files.values()).encode()).hexdigest()[:12]

    async def index(self, request: Request) -> Response:
        return self._page("index", "runs")

    async def index_events(self, request: Request) -> Response:
        return _stream(self._rows.events(self._is_closing))

    async def run(self, request: Request) -> Response:
        entry = await self._find(request)
        return self._page(_PAGES[entry.kind], entry.name)

    async def run_events(self, request: Request) -> Response:
        shared = self._shared(await self._find(request))
        return _stream(shared.events(self._is_closing))

    async def spans(self, request: Request) -> Response:
        shared = self._shared(await self._find(request))
        offset, reader, spans = request.query_params.get("at", ""), shared.reader, None
        if isinstance(reader, Reader) and offset.isascii() and offset.isdigit() and len(offset) < 19:
            await shared.refresh()
            spans = await run_in_threadpool(reader.spans, int(offset))
        if spans is None:
            raise HTTPException(404, "This run has no such segment.")
        return Response(as_json(spans), media_type="application/json")

    async def compare(self, request: Request) -> Response:
        await run_in_threadpool(self._ticked, request)
        return self._page("several", "comparison")

    async def compare_events(self, request: Request) -> Response:
        paths = await run_in_threadpool(self._ticked, request)

        def ticked() -> list[Entry]:
            return [entry for path in paths if (entry := self._runs.find(path)) is not None]

        shared = self._followed("?".join(paths), lambda: SeveralReader(ticked))
        return _stream(shared.events(self._is_closing))

    async def file(self, request: Request) -> Response:
        text, kind = self._files.get(request.path_params["name"], ("", ""))
        if not kind:
            raise HTTPException(404, "There is no such file.")
        return Response(text, media_type=kind, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    async def error(self, request: Request, error: Exception) -> Response:
        """Answer with a page that says what is wrong and links to the first page."""
        assert isinstance(error, HTTPException)
        sentence = "There is no such page." if error.detail == "Not Found" else error.detail
        return HTMLResponse(page.error_page(sentence, self._version), error.status_code)

    def _page(self, name: str, title: str) -> Response:
        return HTMLResponse(page.served_page(name, title, self._version))

    async def _find(self, request: Request) -> Entry:
        path = request.path_params["path"]
        places = [self._runs] if request.url.path.startswith("/run/") else [self._packs, self._runs]
        for place in filter(None, places):
            entry = await run_in_threadpool(place.find, path)
            if entry is not None:
                return entry
        raise HTTPException(404, "There is no such run in this folder.")

    def _shared(self, entry: Entry) -> _SharedPage:
        """Return what all browsers share that show a run, group, sweep or pack."""

        def reader() -> _Reader:
            if entry.kind == PACK:
                return PackReader(entry, self._runs.at)
            if entry.kind == SWEEP:
                return SweepReader(entry)
            return SeveralReader(entry.members, entry) if entry.kind == GROUP else Reader(entry.folder)

        return self._followed(str(entry.folder), reader)

    def _followed(self, key: str, reader: Callable[[], _Reader]) -> _SharedPage:
        known = self._shared_pages.get(key)
        if known is None:
            made = reader()
            known = _SharedPage(made, _POLL_S if isinstance(made, Reader) else _ROWS_POLL_S)
        return self._shared_pages.setdefault(key, known)

    def _ticked(self, request: Request) -> list[str]:
        """Return the runs and groups that are to be compared."""
        paths = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(paths) <= _MOST_COMPARED:
            raise HTTPException(400, f"Tick 2 to {_MOST_COMPARED} runs to compare them.")
        for path in paths:
            entry = self._runs.find(path)
            if entry is None or entry.kind not in (RUN, GROUP):
                raise HTTPException(404, "One of these runs is not in this folder.")
        return paths


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def dashboard_app(
    runs: Runs,
    *,
    packs: Runs | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
    port: int = 0,
    is_closing: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Create the app for a folder of runs and one of packs; its event streams end once `is_closing` returns True."""
    site = _Site(runs, packs, is_closing)
    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": site.index,
        "/events": site.index_events,
        "/compare": site.compare,
        "/compare/events": site.compare_events,
        # No member of a group or sweep is called events or spans.
        "/run/{path:path}/events": site.run_events,
        "/run/{path:path}/spans": site.spans,
        "/run/{path:path}": site.run,
        "/pack/{path}/events": site.run_events,
        "/pack/{path}": site.run,
        "/static/{name}": site.file,
    }
    # Cookies ignore ports: two dashboards on one machine must not share one.
    guard = Middleware(Guard, host=host, token=token, cookie=f"unidle-{port}")
    routes = [Route(path, answer) for path, answer in handlers.items()]
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: site.error})
