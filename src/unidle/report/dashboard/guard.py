"""Access control of the dashboard: only this machine's host names, the token, and read-only methods.

A foreign page in the user's browser can send requests to 127.0.0.1 under its own host name (DNS rebinding); checking
the Host header prevents this.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_for(host: str) -> set[str]:
    """Return the host names accepted by a server bound to `host`, besides IP addresses if it is open to others."""
    names = {"localhost", "127.0.0.1", "::1", host.lower()}
    return names if is_loopback(host) else names | {socket.gethostname().lower(), socket.getfqdn().lower()}


class Guard:
    """ASGI middleware that rejects unauthorised requests and adds security headers to responses."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, cookie: str) -> None:
        self._app = app
        self._names = names_for(host)
        self._takes_addresses = not is_loopback(host)
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it with a sentence."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        in_query = self._is_token(_query_tokens(scope))
        refusal = self._refusal(scope, headers, in_query)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    answer.setdefault(name, value)
                if in_query and refusal is None:
                    # The page's own requests and links need not carry the token then.
                    answer.append("Set-Cookie", f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers, in_query: bool) -> PlainTextResponse | None:
        if scope["method"] not in ("GET", "HEAD"):
            return _refuse("The dashboard is read-only.", 405)
        if not self._is_own_name(headers.get("host", "")):
            sentence = "The dashboard does not accept this host name; use its address or start it with --host NAME."
            return _refuse(sentence, 403)
        if self._token is not None and not in_query and not self._is_token(_cookies(headers, self._cookie)):
            return _refuse("This dashboard needs a token; open the address that it printed.", 401)
        return None

    def _is_own_name(self, host: str) -> bool:
        name = _without_port(host).lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._takes_addresses  # DNS rebinding needs a name, not an address

    def _is_token(self, given: Iterable[str]) -> bool:
        if self._token is None:
            return False
        return any(hmac.compare_digest(word.encode(), self._token.encode()) for word in given)


def _refuse(sentence: str, status: int) -> PlainTextResponse:
    """Return a response after which the connection ends: strangers cannot hold connections by repeated requests."""
    return PlainTextResponse(sentence, status, {"Connection": "close"})


def _without_port(host: str) -> str:
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _query_tokens(scope: Scope) -> list[str]:
    return parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=None, errors="replace").get("token", [])


def _cookies(headers: Headers, name: str) -> list[str]:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return []
    return [cookies[name].value] if name in cookies else []
