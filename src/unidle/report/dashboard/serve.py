"""Serves the dashboard until Ctrl-C."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp

from unidle.errors import UsageError
from unidle.report.dashboard.app import dashboard_app
from unidle.report.dashboard.connection import Connection
from unidle.report.dashboard.folders import Runs

_NO_ADDRESS = "--host {} is not an address of this machine; use 127.0.0.1 for local access only."


def serve(
    folder: Path, host: str, port: int, token: str | None, say: Callable[[str], None], packs: Path | None = None
) -> None:
    """Serve the runs of `folder` and the packs of another; `say` receives the address once it is bound.

    Without `token`, a random one is used.
    A loopback address needs one too: any user of this machine can connect to it.
    """
    runs = Runs(folder)
    jobs = None if packs is None else Runs(packs)
    token = token or secrets.token_urlsafe(24)
    with _bound(host, port) as bound:
        port = bound.getsockname()[1]
        server: Server
        app = dashboard_app(runs, packs=jobs, host=host, token=token, port=port, is_closing=lambda: server.should_exit)
        server = Server(app)
        say(address(host, port, token))
        server.run(sockets=[bound])


class Server(uvicorn.Server):
    """Stops at the first signal and ignores a second one, which a terminal or wrapper may send right after it."""

    def __init__(self, app: ASGIApp) -> None:
        # No access log: it would contain the token. No warnings: anyone can cause them. The backlog limits how many
        # connections are accepted at once, before `Connection` closes those that are too many.
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                backlog=64,
                log_level="error",
                access_log=False,
                timeout_graceful_shutdown=3,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server."""
        self.should_exit = True


def address(host: str, port: int, token: str) -> str:
    """Return the URL to open in a browser."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    return f"http://{name}:{port}/?token={quote(token, safe='')}"


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that the printed address already works."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise UsageError(_NO_ADDRESS.format(host)) from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise UsageError(_NO_ADDRESS.format(host)) from None
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"The dashboard cannot listen on {host}:{port} ({reason}); choose another --port, or 0 for any free one."
        ) from None
    return bound
