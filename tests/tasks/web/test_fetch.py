"""Fetcher: allow-lists, redirects, hostile servers, retries, rate and connection limits, robots.txt."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import sys
import time
import tracemalloc
import zlib
from ipaddress import ip_address
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from web_servers import hello, http_server, raw_server, run

from unidle.errors import UsageError
from unidle.tasks.web.addresses import AllowList, RefusedError, is_public
from unidle.tasks.web.body import _Inflater
from unidle.tasks.web.fetch import Fetcher
from unidle.tasks.web.fetch_policy import FetchPolicy, Page
from unidle.tasks.web.robots import Robots

SHORT_TIMEOUTS: dict[str, Any] = {"seconds": 1.0, "backoff": 0.01}


async def fetch_page(url: str, method: str = "GET", lookup: Any = None, **policy: Any) -> Page:
    fetcher = Fetcher(FetchPolicy(**{**SHORT_TIMEOUTS, **policy}), lookup)
    try:
        return await fetcher.fetch(url, method)
    finally:
        await fetcher.close()


# -- allowed addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("239.255.255.250", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("198.18.0.1", False),
        ("192.0.2.1", False),
        ("::1", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("::7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("2001:db8::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("fc00::1", False),
        ("ff02::1", False),
    ],
)
def test_is_public_rejects_private_and_reserved_addresses(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    ("hosts", "host", "allowed"),
    [
        ([], "127.0.0.1", True),
        ([], "127.9.9.9", True),
        ([], "::1", True),
        ([], "localhost", True),
        ([], "LOCALHOST.", True),
        ([], "::ffff:127.0.0.1", True),
        ([], "64:ff9b::7f00:1", False),
        ([], "::1%1", False),
        ([], "10.0.0.1", False),
        ([], "0.0.0.0", False),
        ([], "example.org", False),
        ([], "2130706433", False),
        ([], "0x7f.0.0.1", False),
        ([], "127.1", False),
        ([], "localhost.example.org", False),
        (["example.org"], "example.org", True),
        (["example.org"], "EXAMPLE.org.", True),
        (["example.org"], "www.example.org", False),
        (["example.org"], "notexample.org", False),
        (["example.org"], "127.0.0.1", False),
        (["example.org"], "localhost", False),
        (["*.example.org"], "www.example.org", True),
        (["*.example.org"], "example.org", False),
        (["*.example.org"], "badexample.org", False),
        (["example.org:8080"], "example.org", False),
        (["example.org:80"], "example.org", True),
        (["bücher.example"], "xn--bcher-kva.example", True),
        (["10.0.0.0/8"], "10.200.0.1", True),
        (["10.0.0.0/8"], "11.0.0.1", False),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", True),
        (["127.0.0.1:80"], "127.0.0.1", True),
        (["127.0.0.1:81"], "127.0.0.1", False),
        (["[::1]:80"], "::1", True),
        (["*.2"], "1.1.1.2", False),
    ],
)
def test_allow_list_admits_only_listed_hosts(hosts: list[str], host: str, allowed: bool) -> None:
    if hosts == ["*.2"]:
        with pytest.raises(UsageError):
            AllowList.of(hosts)
        return
    if allowed:
        AllowList.of(hosts).check_host(host, 80)
    else:
        with pytest.raises(RefusedError):
            AllowList.of(hosts).check_host(host, 80)


@pytest.mark.parametrize("entry", ["http://example.org", "", "two words", "example.org/path", "127.1", "a:99999"])
def test_malformed_host_entry_raises_usage_error(entry: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        FetchPolicy(hosts=(entry,))


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:10.0.0.1]/",
        "http://[fe80::1]/",
        "http://0.0.0.0/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://127.1/",
        "http://example.org/",
        "https://127.0.0.1@example.org/",
        "http://user:secret@127.0.0.1/",
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "javascript:alert(1)",
        "//127.0.0.1/",
        "http://",
        "http://[::1",
        "",
        "not a url",
    ],
)
def test_unlisted_url_is_refused_without_dns_lookup(url: str) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    page = run(fetch_page(url, lookup=lookup))
    assert (page.failure, page.status, page.body) == ("refused", 0, b"")


def test_listed_host_with_private_address_is_refused_before_connecting() -> None:
    async def check() -> None:
        async with raw_server(_stay_silent) as server:
            for responses in (
                ["127.0.0.1"],
                ["10.0.0.1"],
                ["::ffff:127.0.0.1"],
                ["93.184.216.34", "127.0.0.1"],
                ["::1%lo"],
            ):

                async def lookup(host: str, port: int, responses: list[str] = responses) -> list[str]:
                    return responses

                page = await fetch_page(
                    f"http://site.test:{server.port}/", lookup=lookup, hosts=("site.test",), rate=1e3
                )
                assert page.failure == "refused", responses
            assert server.max_concurrent == 0

    run(check())


def test_resolved_address_is_checked_at_every_connection() -> None:
    async def check() -> None:
        lookups: list[str] = []

        async def lookup(host: str, port: int) -> list[str]:
            lookups.append(host)
            return ["127.0.0.2"] if len(lookups) == 1 else ["127.0.0.1"]

        async def answer_once(request: web.BaseRequest) -> web.Response:
            response = await hello(request)
            response.force_close()
            return response

        async with http_server(answer_once, host="127.0.0.2") as allowed_server, raw_server(_stay_silent) as victim:
            policy = FetchPolicy(
                hosts=("site.test", f"127.0.0.2:{allowed_server.port}"), obey_robots=False, rate=1e3, **SHORT_TIMEOUTS
            )
            fetcher = Fetcher(policy, lookup)
            url = f"http://site.test:{allowed_server.port}/"
            assert (await fetcher.fetch(url)).failure is None
            second = await fetcher.fetch(url)
            assert second.failure == "refused"
            assert "127.0.0.1" in second.why
            assert (len(lookups), len(allowed_server.requests), victim.max_concurrent) == (2, 1, 0)
            assert allowed_server.requests[0].headers["Host"] == f"site.test:{allowed_server.port}"
            await fetcher.close()

    run(check())


def test_dns_rebinding_to_a_private_address_is_refused() -> None:
    async def check() -> None:
        responses = iter([["93.184.216.34"], ["10.0.0.7"]])

        async def lookup(host: str, port: int) -> list[str]:
            return next(responses)

        fetcher = Fetcher(FetchPolicy(hosts=("site.test",)), lookup)
        assert [found["host"] for found in await fetcher._resolve("site.test", 80)] == ["93.184.216.34"]
        with pytest.raises(RefusedError, match=r"10\.0\.0\.7"):
            await fetcher._resolve("site.test", 80)
        with pytest.raises(RefusedError):
            fetcher._create_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.7", 80)))
        await fetcher.close()

    run(check())


def test_unknown_host_gives_dns_failure() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    page = run(fetch_page("http://site.test/", lookup=lookup, hosts=("site.test",), rate=1000.0, obey_robots=False))
    assert (page.failure, page.attempts) == ("dns", 3)


# -- redirects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "failure"),
    [
        ("http://10.0.0.1/", "refused"),
        ("http://169.254.169.254/latest/", "refused"),
        ("http://[::ffff:192.168.0.1]/", "refused"),
        ("//example.org/", "refused"),
        ("http://localhost.example.org/", "refused"),
        ("file:///etc/passwd", "refused"),
        ("ftp://127.0.0.1/", "refused"),
        ("javascript:alert(1)", "refused"),
        ("http://[::1", "redirects"),
        ("/start", "redirects"),
        ("/ping", "redirects"),
        ("/forever/0", "redirects"),
        ("/end#there", None),
        ("end", None),
        ("/private/x", "robots"),
    ],
)
def test_every_redirect_is_checked_like_a_new_request(location: str, failure: str | None) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path == "/end":
            return await hello(request)
        if request.path.startswith("/forever/"):
            target = f"/forever/{int(request.path[9:]) + 1}"
        else:
            target = {"/start": location, "/ping": "/pong", "/pong": "/ping"}[request.path]
        return web.Response(status=302, headers={"Location": target})

    async def check() -> None:
        async with http_server(answer, robots="User-agent: *\nDisallow: /private/") as server:
            page = await fetch_page(f"{server.url}start")
            assert page.failure == failure
            assert "/private/x" not in server.paths
            if failure is None:
                assert (page.url, page.redirects, page.status) == (f"{server.url}end", 1, 200)
            assert len(server.requests) <= 2 + 5 + 1

    run(check())


def test_redirect_to_unlisted_port_never_connects() -> None:
    async def check() -> None:
        async with raw_server(_stay_silent) as other:

            async def answer(request: web.BaseRequest) -> web.Response:
                return web.Response(status=307, headers={"Location": other.url})

            async with http_server(answer) as server:
                page = await fetch_page(server.url, hosts=(f"127.0.0.1:{server.port}",))
            assert page.failure == "refused"
            assert other.max_concurrent == 0

    run(check())


# -- hostile servers ---------------------------------------------------------------------------------------------------


async def _stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _endless_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: and more\r\n" * 1000)
        await writer.drain()


async def _drip_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _reset_mid_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nhalf of it")
    await writer.drain()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def _declare_huge_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\nbegins")
    await writer.drain()
    await reader.read()


async def _send_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")


async def _close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize(
    ("behaviour", "failures", "attempts"),
    [
        (_stay_silent, {"timeout"}, 1),
        (_endless_body, {"too_large"}, 1),
        (_endless_headers, {"broken", "timeout"}, 1),
        (_drip_body, {"timeout"}, 1),
        (_reset_mid_body, {"broken"}, 3),
        (_declare_huge_body, {"too_large"}, 1),
        (_send_garbage, {"broken"}, 1),
        (_close_at_once, {"broken"}, 3),
    ],
)
def test_hostile_server_gives_failure_within_time_and_memory(behaviour: Any, failures: set[str], attempts: int) -> None:
    async def check() -> None:
        async with raw_server(behaviour) as server:
            tracemalloc.start()
            began = time.monotonic()
            page = await fetch_page(server.url, seconds=0.4, max_bytes=500_000, obey_robots=False)
            seconds, (_, peak_bytes) = time.monotonic() - began, tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert page.failure in failures
            assert page.attempts == attempts
            assert page.why
            assert page.body == b""
            assert seconds < 2
            assert peak_bytes < 10_000_000
            await asyncio.sleep(0.1)
            assert server.concurrent == 0  # no connection was left open

    run(check())


def test_refused_connection_gives_connect_failure() -> None:
    with socket.socket() as unused:  # a port that nobody listens on
        unused.bind(("127.0.0.1", 0))
        page = run(fetch_page(f"http://127.0.0.1:{unused.getsockname()[1]}/"))
    assert page.failure == "connect"


def _raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "sent", "failure"),
    [
        ("gzip", gzip.compress(b"hello" * 1000), None),
        ("deflate", zlib.compress(b"hello" * 1000), None),
        ("deflate", _raw_deflate(b"hello" * 1000), None),
        ("identity", b"hello" * 1000, None),
        ("gzip", gzip.compress(bytes(50_000_000)), "too_large"),
        ("deflate", zlib.compress(bytes(50_000_000)), "too_large"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"hello")), "broken"),
        ("br", b"hello", "broken"),
        ("gzip", b"this is not gzip at all", "broken"),
        ("gzip", gzip.compress(b"hello" * 400) + gzip.compress(b"hello" * 600), None),
        ("gzip", gzip.compress(b"hello" * 1000) + bytes(100), None),
    ],
    ids=lambda part: part if isinstance(part, str) else "",  # compressed bytes contain the time
)
def test_compressed_bodies_are_decoded_and_bombs_rejected(encoding: str, sent: bytes, failure: str | None) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=sent, headers={"Content-Encoding": encoding}, content_type="text/html")

    async def check() -> None:
        async with http_server(answer) as server:
            tracemalloc.start()
            page = await fetch_page(server.url, max_bytes=100_000)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert page.failure == failure
            assert page.body == (b"" if failure else b"hello" * 1000)
            assert peak_bytes < 5_000_000

    run(check())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
def test_compressed_body_that_is_cut_short_is_broken(encoding: str) -> None:
    text = b"".join(b"%d " % n for n in range(2000))
    sent = {"gzip": gzip.compress(text), "deflate": zlib.compress(text), "raw deflate": _raw_deflate(text)}[encoding]

    async def check() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            body = sent[: int(request.path[1:])]
            return web.Response(body=body, headers={"Content-Encoding": encoding.split()[-1]})

        async with http_server(answer) as server:
            for size in (1, 2, 11, len(sent) // 2, len(sent) - 1):
                page = await fetch_page(f"{server.url}{size}")
                assert (page.failure, page.body) == ("broken", b""), size
            assert (await fetch_page(f"{server.url}0")).failure is None  # nothing at all, as after a 204
            assert (await fetch_page(f"{server.url}{len(sent)}")).body == text

    run(check())


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"hello", mtime=0), zlib.compress(b"hello"), _raw_deflate(b"hello")],
    ids=["gzip", "deflate", "raw deflate"],
)
def test_compressed_body_may_arrive_byte_by_byte(data: bytes) -> None:
    inflater = _Inflater(is_deflate=data[:2] != b"\x1f\x8b")
    assert b"".join(inflater.decompress(data[i : i + 1], 100) for i in range(len(data))) == b"hello"
    assert inflater.is_complete


def test_content_type_and_charset_are_parsed() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=b"\xe4", headers={"Content-Type": 'Text/HTML; boundary=x; Charset="ISO-8859-1"'})

    async def check() -> None:
        async with http_server(answer) as server:
            page = await fetch_page(server.url)
            assert (page.content_type, page.charset, page.body) == ("text/html", "iso-8859-1", b"\xe4")

    run(check())


# -- retries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "failure", "attempts"),
    [
        ([503, 200], None, 2),
        ([429, 502, 200], None, 3),
        ([503, 503, 503, 200], "status", 3),
        ([500, 200], "status", 1),
        ([404, 200], "status", 1),
        ([304, 200], "status", 1),
    ],
)
def test_transient_statuses_are_retried(statuses: list[int], failure: str | None, attempts: int) -> None:
    async def check() -> None:
        remaining = iter(statuses)

        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(status=next(remaining))

        async with http_server(answer) as server:
            fetcher = Fetcher(FetchPolicy(**SHORT_TIMEOUTS))
            page = await fetcher.fetch(server.url)
            await fetcher.close()
            assert (page.failure, page.attempts) == (failure, attempts)
            assert page.status == statuses[attempts - 1]
            assert fetcher.outcomes["retry"] == attempts - 1
            assert fetcher.outcomes[failure or "ok"] == 1

    run(check())


@pytest.mark.parametrize(("retry_after", "attempts", "min_seconds"), [("1", 2, 1.0), ("3600", 1, 0.0)])
def test_retry_after_delays_the_retry_or_prevents_it(retry_after: str, attempts: int, min_seconds: float) -> None:
    async def check() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            if len(server.times) > 1:
                return await hello(request)
            return web.Response(status=503, headers={"Retry-After": retry_after})

        # Not 127.0.0.1: Retry-After holds for the whole host, and so for later tests.
        async with http_server(answer, host=f"127.0.1.{attempts}") as server:
            page = await fetch_page(server.url)
            assert page.attempts == attempts
            assert page.seconds >= min_seconds

    run(check())


# -- policy -----------------------------------------------------------------------------------------------------------


def test_requests_send_only_the_expected_headers() -> None:
    async def check() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(text="x", headers={"Set-Cookie": "id=1"})

        async with http_server(answer) as server:
            fetcher = Fetcher(FetchPolicy(user_agent="unidle-test/1 (me@example.org)"))
            for _ in range(2):
                await fetcher.fetch(server.url)
            await fetcher.close()
            headers = server.requests[-1].headers
            assert set(headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding"}
            assert headers["User-Agent"] == "unidle-test/1 (me@example.org)"

    run(check())


def test_only_get_and_head_are_sent() -> None:
    async def check() -> None:
        async with http_server(hello) as server:
            page = await fetch_page(server.url, "HEAD")
            assert (page.status, page.body, page.failure) == (200, b"", None)
            assert server.requests[-1].method == "HEAD"
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get", "GET /x HTTP/1.1\r\nX:"):
                with pytest.raises(UsageError, match="Only GET and HEAD"):
                    await fetch_page(server.url, method)
            assert {request.method for request in server.requests} == {"GET", "HEAD"}

    run(check())


def test_fetchers_share_the_rate_limit_of_a_host() -> None:
    async def check() -> None:
        async with http_server(hello, host="127.0.1.11") as server:
            fetchers = [Fetcher(FetchPolicy(rate=25.0, obey_robots=False)) for _ in range(2)]
            waiting = [asyncio.create_task(fetchers[n % 2].fetch(server.url)) for n in range(40)]
            await asyncio.sleep(0)
            for task in waiting[12:]:
                task.cancel()  # a cancelled request does not use up a turn
            await asyncio.gather(*waiting, return_exceptions=True)
            for fetcher in fetchers:
                await fetcher.close()
            gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:])]
            assert len(server.times) == 12
            assert server.times[-1] - server.times[0] >= 11 / 25 - 0.02
            assert min(gaps) > 0.02  # 0.04 s between sends; arrival times vary
            assert server.times[-1] - server.times[0] < 1.5

    run(check())


def test_concurrent_requests_respect_the_connection_limit() -> None:
    async def slowly(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.02)
        return await hello(request)

    async def check() -> None:
        async with http_server(slowly) as server:
            fetcher = Fetcher(FetchPolicy(connections=3, **SHORT_TIMEOUTS))
            pages = await asyncio.gather(*(fetcher.fetch(f"{server.url}{n}") for n in range(30)))
            await fetcher.close()
            assert {page.failure for page in pages} == {None}
            assert server.max_concurrent == 3

    run(check())


def test_robots_txt_is_fetched_once_and_obeyed() -> None:
    async def check() -> None:
        robots = "User-agent: *\nDisallow: /private/\nAllow: /private/but-this"
        async with http_server(hello, robots=robots) as server:
            fetcher = Fetcher(FetchPolicy(**SHORT_TIMEOUTS))
            names = ["a", "private/b", "private/but-this", "%70rivate/c", "d?private/"]
            pages = await asyncio.gather(*(fetcher.fetch(f"{server.url}{name}") for name in names * 10))
            assert [page.failure for page in pages[:5]] == [None, "robots", None, "robots", None]
            assert server.paths.count("/robots.txt") == 1
            assert fetcher.may_follow([f"{server.url}{name}" for name in names]) == [True, False, True, False, True]
            assert fetcher.may_follow(["http://10.0.0.1/", "http://example.org/x"]) == [False, False]
            await fetcher.close()
            ignored = await fetch_page(f"{server.url}private/b", obey_robots=False)
            assert ignored.failure is None

    run(check())


def test_page_is_not_fetched_while_robots_txt_is_unavailable() -> None:
    async def check() -> None:
        async with raw_server(_answer_503) as server:
            page = await fetch_page(f"{server.url}page")
            assert (page.failure, page.status) == ("status", 503)
            assert "robots.txt" in page.why

    run(check())


async def _answer_503(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_crawl_delay_is_respected() -> None:
    async def check() -> None:
        robots = "User-agent: unidle\nCrawl-delay: 0.2\n\nUser-agent: *\nDisallow: /"
        async with http_server(hello, robots=robots, host="127.0.1.12") as server:
            fetcher = Fetcher(FetchPolicy(**SHORT_TIMEOUTS))
            await asyncio.gather(*(fetcher.fetch(f"{server.url}{n}") for n in range(4)))
            await fetcher.close()
            assert server.times[-1] - server.times[0] >= 0.58

    run(check())


def test_endless_crawl_delay_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.tasks.web.fetch._MAX_PAUSE", 0.1)

    async def check() -> None:
        async with http_server(hello, robots="User-agent: *\nCrawl-delay: 1e9", host="127.0.1.13") as server:
            fetcher = Fetcher(FetchPolicy(**SHORT_TIMEOUTS))
            pages = await asyncio.gather(*(fetcher.fetch(f"{server.url}{n}") for n in range(3)))
            await fetcher.close()
            assert [page.failure for page in pages] == [None] * 3

    run(check())


def test_cancelled_request_keeps_robots_txt_available_to_others() -> None:
    async def check() -> None:
        async with http_server(hello, robots="User-agent: *\nDisallow: /no") as server:
            fetcher = Fetcher(FetchPolicy(**SHORT_TIMEOUTS))
            first = asyncio.create_task(fetcher.fetch(server.url))
            second = asyncio.create_task(fetcher.fetch(server.url))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).failure is None
            await fetcher.close()

    run(check())


def test_cancelled_requests_release_connections_and_slots() -> None:
    async def check() -> None:
        async with raw_server(_stay_silent) as silent, http_server(hello) as server:
            fetcher = Fetcher(FetchPolicy(connections=2, obey_robots=False))
            for _ in range(5):
                requests = [asyncio.create_task(fetcher.fetch(silent.url)) for _ in range(8)]
                await asyncio.sleep(0.02)
                for task in requests:
                    task.cancel()
                results = await asyncio.gather(*requests, return_exceptions=True)
                assert all(isinstance(result, asyncio.CancelledError) for result in results)
            page = await fetcher.fetch(server.url)
            assert page.failure is None
            assert page.seconds < 1
            await asyncio.sleep(0.05)
            assert silent.concurrent == 0
            assert len(asyncio.all_tasks()) <= 3  # this task, its timeout and the server's
            await fetcher.close()

    run(check())


def test_shared_fetcher_closes_when_its_last_user_leaves() -> None:
    async def check() -> None:
        one, other = Fetcher.shared(FetchPolicy()), Fetcher.shared(FetchPolicy())
        assert one is other
        assert Fetcher.shared(FetchPolicy(rate=1.0)) is not one
        await one.release()
        async with http_server(hello) as server:
            assert (await other.fetch(server.url)).failure is None
            await other.release()
            with pytest.raises(RuntimeError, match="closed"):
                await other.fetch(server.url)
        assert Fetcher.shared(FetchPolicy()) is not one

    run(check())


def test_missing_aiohttp_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
        Fetcher()


# -- robots.txt rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "path", "allowed"),
    [
        ("Disallow:", "/x", True),
        ("Disallow: /", "/x", False),
        ("Disallow: /a\nAllow: /a/b", "/a/b/c", True),
        ("Allow: /a\nDisallow: /a", "/a", True),
        ("Disallow: /*.pdf$", "/x/y.pdf", False),
        ("Disallow: /*.pdf$", "/x/y.pdf?z", True),
        ("Disallow: /a*b*c", "/a--b--c", False),
        ("Disallow: /a*b*c", "/a--c--b", True),
        ("Disallow: /*a$", "/ba", False),
        ("Disallow: /aba*ba$", "/aba", True),
        ("Disallow: /x$", "/x", False),
        ("Disallow: /x$", "/xy", True),
        ("Disallow: /caf%C3%A9", "/café", False),
        ("Disallow: /a # why", "/a", False),
        ("disallow : /a", "/a", False),
        ("Disallow: /", "/robots.txt", True),
        ("Sitemap: /s\nDisallow: /a", "/a", False),
    ],
)
def test_longest_matching_robots_rule_wins(rules: str, path: str, allowed: bool) -> None:
    assert Robots.parse(f"User-agent: *\n{rules}", "unidle").allows(path) is allowed


def test_robots_uses_own_groups_or_the_default_group() -> None:
    groups = ("User-Agent: other\nUser-Agent: Unidle/2\nDisallow: /a", "User-agent: *\nDisallow: /b")
    text = "\n\n".join((*groups, "user-agent: unidle\nDisallow: /c"))
    own, others = Robots.parse(text, "unidle"), Robots.parse(text, "else")
    assert [own.allows(path) for path in ("/a", "/b", "/c")] == [False, True, False]
    assert [others.allows(path) for path in ("/a", "/b", "/c")] == [True, False, True]


_HOSTILE_ROBOTS = {
    "many agents share many rules": "User-agent: x\n" * 18_000 + "User-agent: *\n" + "Disallow: /x\n" * 19_000,
    "many rules": "User-agent: *\n" + "".join(f"Disallow: /{n}\n" for n in range(28_000)),
    "rules of all lengths": "User-agent: *\n" + "".join(f"Disallow: /{'a' * n}b\n" for n in range(970)),
    "many wildcards": "User-agent: *\n" + "".join(f"Disallow: /*{'a' * 20}b{n:03}\n" for n in range(300)),
    "one rule of wildcards": "User-agent: *\nDisallow: /" + "*a" * 4000 + "b",
}


@pytest.mark.parametrize("robots", _HOSTILE_ROBOTS.values(), ids=_HOSTILE_ROBOTS)
def test_hostile_robots_txt_does_not_stop_the_event_loop(robots: str) -> None:
    async def check() -> None:
        async with http_server(hello, robots=robots) as server:
            fetcher = Fetcher(FetchPolicy(seconds=10.0))
            began = time.monotonic()
            assert (await fetcher.fetch(f"{server.url}page")).failure is None
            assert all(fetcher.may_follow([f"{server.url}{'a' * 120}{n}" for n in range(1000)]))  # of one page
            await fetcher.close()
            assert time.monotonic() - began < 2

    run(check())


@pytest.mark.parametrize("rules", ["Disallow: /*a$\n" * 3000, "Disallow: /" + "*a" * 5000])
def test_site_whose_robots_txt_is_too_complex_is_not_fetched(rules: str) -> None:
    async def check() -> None:
        async with http_server(hello, robots=f"User-agent: *\n{rules}") as server:
            page = await fetch_page(f"{server.url}page")
            assert page.failure == "robots"
            assert "wildcards" in page.why
            assert server.paths == ["/robots.txt"]

    run(check())


_PATTERN = st.text("ab*$", max_size=6).map("/".__add__)


@given(st.lists(st.tuples(_PATTERN, st.booleans()), max_size=5), st.text("ab$", max_size=7).map("/".__add__))
def test_robots_rules_match_as_regular_expressions_do(rules: list[tuple[str, bool]], path: str) -> None:
    text = "".join(f"{'Allow' if allowed else 'Disallow'}: {pattern}\n" for pattern, allowed in rules)
    matching = [(len(pattern), allowed) for pattern, allowed in rules if _regex(pattern).match(path)]
    assert Robots.parse(f"User-agent: *\n{text}", "unidle").allows(path) is max(matching, default=(0, True))[1]


def _regex(pattern: str) -> re.Pattern[str]:
    parts = map(re.escape, pattern.removesuffix("$").split("*"))
    return re.compile(".*".join(parts) + (r"\Z" if pattern.endswith("$") else ""))
