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

from unidle.errors import UsageError
from unidle.report.dashboard.app import dashboard_app
from unidle.report.dashboard.files import Runs
from unidle.report.dashboard.guard import is_loopback

_NO_ADDRESS = "--host {} is not an address of this machine; use 127.0.0.1 for local access only."


def serve(folder: Path, host: str, port: int, token: str | None, say: Callable[[str], None]) -> None:
    """Serve the runs of `folder`; `say` receives the address once it is bound."""
    runs = Runs(folder)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)  # otherwise anyone who can reach this machine could read all runs
    with _bound(host, port) as bound:
        port = bound.getsockname()[1]
        server: _Server
        app = dashboard_app(runs, host=host, token=token, port=port, is_closing=lambda: server.should_exit)
        # No access log: it would contain the token.
        server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3))
        say(address(host, port, token))
        server.run(sockets=[bound])


class _Server(uvicorn.Server):
    """Stops at the first signal and ignores a second one, which a terminal or wrapper may send right after it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server."""
        self.should_exit = True


def address(host: str, port: int, token: str | None) -> str:
    """Return the URL to open in a browser."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


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
