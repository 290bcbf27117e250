"""Requests to a dashboard's server, and the rows of its first page."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from unidle.report.dashboard.folders import Runs
from unidle.report.dashboard.rows import Rows


@dataclass
class Response:
    status: int
    headers: Message
    text: str


def get(port: int, path: str, method: str = "GET", **headers: str) -> Response:
    """Request a path exactly as given, without the normalisation of client libraries."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return Response(response.status, response.headers, response.read().decode())


def rows_of(folder: Path, rows: Rows | None = None) -> list[Any]:
    """The rows of the first page; earlier `rows` are kept if their files have not changed."""
    return (rows or Rows()).of(list(Runs(folder).entries()))


class Events:
    """A stream of server-sent events."""

    def __init__(self, port: int, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        self._connection.request("GET", path)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.headers["content-type"].startswith("text/event-stream")

    def next(self) -> Any:
        while not (line := self._response.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        return json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self._connection.close()


@contextmanager
def events_of(port: int, path: str) -> Iterator[Events]:
    with closing(Events(port, path)) as events:
        yield events
