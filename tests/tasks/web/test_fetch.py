"""Nothing is asked that must not be, nothing breaks whatever answers, and nobody is asked too much."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
import time
import tracemalloc
import zlib
from ipaddress import ip_address
from typing import Any

import pytest
from aiohttp import web
from web_servers import answering, hello, run, talking

from unidle.errors import UsageError
from unidle.tasks.web.addresses import AllowList, RefusedError, is_public
from unidle.tasks.web.fetch import Fetcher
from unidle.tasks.web.fetch_policy import FetchPolicy, Page
from unidle.tasks.web.robots import Robots

QUICK: dict[str, Any] = {"seconds": 1.0, "backoff": 0.01}


async def fetched(url: str, method: str = "GET", lookup: Any = None, **policy: Any) -> Page:
    fetcher = Fetcher(FetchPolicy(**{**QUICK, **policy}), lookup)
    try:
        return await fetcher.fetch(url, method)
    finally:
        await fetcher.close()


# -- what may be talked to ---------------------------------------------------------------------------------------------


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
def test_public_addresses_are_told_from_all_others(address: str, public: bool) -> None:
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
def test_only_what_is_listed_is_allowed(hosts: list[str], host: str, allowed: bool) -> None:
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
def test_a_list_that_cannot_be_read_is_said_at_once(entry: str) -> None:
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
def test_what_is_not_listed_is_refused_and_no_name_is_looked_up(url: str) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    page = run(fetched(url, lookup=lookup))
    assert (page.failure, page.status, page.body) == ("refused", 0, b"")


def test_a_listed_name_that_leads_to_a_private_address_is_refused_before_anybody_is_connected_to() -> None:
    async def check() -> None:
        async with talking(_silence) as server:
            for answers in (
                ["127.0.0.1"],
                ["10.0.0.1"],
                ["::ffff:127.0.0.1"],
                ["93.184.216.34", "127.0.0.1"],
                ["::1%lo"],
            ):

                async def lookup(host: str, port: int, answers: list[str] = answers) -> list[str]:
                    return answers

                page = await fetched(f"http://site.test:{server.port}/", lookup=lookup, hosts=("site.test",), rate=1e3)
                assert page.failure == "refused", answers
            assert server.most == 0

    run(check())


def test_a_name_that_changes_its_address_is_checked_at_each_connection() -> None:
    async def check() -> None:
        asked: list[str] = []

        async def lookup(host: str, port: int) -> list[str]:
            asked.append(host)
            return ["127.0.0.2"] if len(asked) == 1 else ["127.0.0.1"]

        async def once(request: web.BaseRequest) -> web.Response:
            response = await hello(request)
            response.force_close()
            return response

        async with answering(once, host="127.0.0.2") as honest, talking(_silence) as victim:
            policy = FetchPolicy(hosts=("site.test", f"127.0.0.2:{honest.port}"), obey_robots=False, rate=1e3, **QUICK)
            fetcher = Fetcher(policy, lookup)
            url = f"http://site.test:{honest.port}/"
            assert (await fetcher.fetch(url)).failure is None
            again = await fetcher.fetch(url)
            assert again.failure == "refused"
            assert "127.0.0.1" in again.why
            assert (len(asked), len(honest.requests), victim.most) == (2, 1, 0)
            assert honest.requests[0].headers["Host"] == f"site.test:{honest.port}"
            await fetcher.close()

    run(check())


def test_a_public_answer_is_taken_and_a_private_one_after_it_is_not() -> None:
    async def check() -> None:
        answers = iter([["93.184.216.34"], ["10.0.0.7"]])

        async def lookup(host: str, port: int) -> list[str]:
            return next(answers)

        fetcher = Fetcher(FetchPolicy(hosts=("site.test",)), lookup)
        assert [found["host"] for found in await fetcher._resolve("site.test", 80)] == ["93.184.216.34"]
        with pytest.raises(RefusedError, match=r"10\.0\.0\.7"):
            await fetcher._resolve("site.test", 80)
        with pytest.raises(RefusedError):
            fetcher._gate((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.7", 80)))
        await fetcher.close()

    run(check())


def test_a_name_that_is_not_known_is_an_outcome() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    page = run(fetched("http://site.test/", lookup=lookup, hosts=("site.test",), rate=1000.0, obey_robots=False))
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
            to = f"/forever/{int(request.path[9:]) + 1}"
        else:
            to = {"/start": location, "/ping": "/pong", "/pong": "/ping"}[request.path]
        return web.Response(status=302, headers={"Location": to})

    async def check() -> None:
        async with answering(answer, robots="User-agent: *\nDisallow: /private/") as server:
            page = await fetched(f"{server.url}start")
            assert page.failure == failure
            assert "/private/x" not in server.paths
            if failure is None:
                assert (page.url, page.redirects, page.status) == (f"{server.url}end", 1, 200)
            assert len(server.requests) <= 2 + 5 + 1

    run(check())


def test_a_redirect_to_a_port_that_is_not_listed_reaches_nobody() -> None:
    async def check() -> None:
        async with talking(_silence) as other:

            async def answer(request: web.BaseRequest) -> web.Response:
                return web.Response(status=307, headers={"Location": other.url})

            async with answering(answer) as server:
                page = await fetched(server.url, hosts=(f"127.0.0.1:{server.port}",))
            assert page.failure == "refused"
            assert other.most == 0

    run(check())


# -- hostile servers ---------------------------------------------------------------------------------------------------


async def _silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _endless_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: and more\r\n" * 1000)
        await writer.drain()


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nhalf of it")
    await writer.drain()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def _declared(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\nbegins")
    await writer.drain()
    await reader.read()


async def _nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")


async def _nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize(
    ("talk", "failures", "attempts"),
    [
        (_silence, {"timeout"}, 1),
        (_endless, {"too_large"}, 1),
        (_endless_headers, {"broken", "timeout"}, 1),
        (_drip, {"timeout"}, 1),
        (_reset, {"broken"}, 3),
        (_declared, {"too_large"}, 1),
        (_nonsense, {"broken"}, 1),
        (_nothing, {"broken"}, 3),
    ],
)
def test_whatever_a_server_does_is_an_outcome_in_time_and_within_memory(
    talk: Any, failures: set[str], attempts: int
) -> None:
    async def check() -> None:
        async with talking(talk) as server:
            tracemalloc.start()
            began = time.monotonic()
            page = await fetched(server.url, seconds=0.4, max_bytes=500_000, obey_robots=False)
            seconds, (_, most) = time.monotonic() - began, tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert page.failure in failures
            assert page.attempts == attempts
            assert page.why
            assert page.body == b""
            assert seconds < 2
            assert most < 10_000_000
            await asyncio.sleep(0.1)
            assert server.now == 0  # no connection was left open

    run(check())


def test_nobody_at_home_is_an_outcome() -> None:
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        page = run(fetched(f"http://127.0.0.1:{taken.getsockname()[1]}/"))
    assert page.failure == "connect"


def _bare(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


@pytest.mark.parametrize(
    ("encoding", "sent", "failure"),
    [
        ("gzip", gzip.compress(b"hello" * 1000), None),
        ("deflate", zlib.compress(b"hello" * 1000), None),
        ("deflate", _bare(b"hello" * 1000), None),
        ("identity", b"hello" * 1000, None),
        ("gzip", gzip.compress(bytes(50_000_000)), "too_large"),
        ("deflate", zlib.compress(bytes(50_000_000)), "too_large"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"hello")), "broken"),
        ("br", b"hello", "broken"),
        ("gzip", b"this is not packed at all", "broken"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",  # the bytes differ from second to second
)
def test_packed_bodies_are_unpacked_and_bombs_are_not(encoding: str, sent: bytes, failure: str | None) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=sent, headers={"Content-Encoding": encoding}, content_type="text/html")

    async def check() -> None:
        async with answering(answer) as server:
            tracemalloc.start()
            page = await fetched(server.url, max_bytes=100_000)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert page.failure == failure
            assert page.body == (b"" if failure else b"hello" * 1000)
            assert most < 5_000_000

    run(check())


def test_what_a_server_says_of_itself_is_kept() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=b"\xe4", headers={"Content-Type": 'Text/HTML; boundary=x; Charset="ISO-8859-1"'})

    async def check() -> None:
        async with answering(answer) as server:
            page = await fetched(server.url)
            assert (page.content_type, page.charset, page.body) == ("text/html", "iso-8859-1", b"\xe4")

    run(check())


# -- trying again ------------------------------------------------------------------------------------------------------


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
def test_what_may_pass_is_tried_again(statuses: list[int], failure: str | None, attempts: int) -> None:
    async def check() -> None:
        left = iter(statuses)

        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(status=next(left))

        async with answering(answer) as server:
            fetcher = Fetcher(FetchPolicy(**QUICK))
            page = await fetcher.fetch(server.url)
            await fetcher.close()
            assert (page.failure, page.attempts) == (failure, attempts)
            assert page.status == statuses[attempts - 1]
            assert fetcher.outcomes["retry"] == attempts - 1
            assert fetcher.outcomes[failure or "ok"] == 1

    run(check())


@pytest.mark.parametrize(("wait", "attempts", "least"), [("1", 2, 1.0), ("3600", 1, 0.0)])
def test_a_server_that_names_a_time_is_asked_then_or_not_again(wait: str, attempts: int, least: float) -> None:
    async def check() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            if len(server.times) > 1:
                return await hello(request)
            return web.Response(status=503, headers={"Retry-After": wait})

        # Not 127.0.0.1: what it asks for holds for the host, whichever test asks next.
        async with answering(answer, host=f"127.0.1.{attempts}") as server:
            page = await fetched(server.url)
            assert page.attempts == attempts
            assert page.seconds >= least

    run(check())


# -- policy -----------------------------------------------------------------------------------------------------------


def test_requests_say_who_asks_and_nothing_else() -> None:
    async def check() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(text="x", headers={"Set-Cookie": "id=1"})

        async with answering(answer) as server:
            fetcher = Fetcher(FetchPolicy(user_agent="unidle-test/1 (me@example.org)"))
            for _ in range(2):
                await fetcher.fetch(server.url)
            await fetcher.close()
            headers = server.requests[-1].headers
            assert set(headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding"}
            assert headers["User-Agent"] == "unidle-test/1 (me@example.org)"

    run(check())


def test_only_get_and_head_are_ever_sent() -> None:
    async def check() -> None:
        async with answering(hello) as server:
            page = await fetched(server.url, "HEAD")
            assert (page.status, page.body, page.failure) == (200, b"", None)
            assert server.requests[-1].method == "HEAD"
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get", "GET /x HTTP/1.1\r\nX:"):
                with pytest.raises(UsageError, match="Only GET and HEAD"):
                    await fetched(server.url, method)
            assert {request.method for request in server.requests} == {"GET", "HEAD"}

    run(check())


def test_the_rate_is_kept_by_all_who_ask_together() -> None:
    async def check() -> None:
        async with answering(hello, host="127.0.1.11") as server:
            fetchers = [Fetcher(FetchPolicy(rate=25.0, obey_robots=False)) for _ in range(2)]
            waiting = [asyncio.create_task(fetchers[n % 2].fetch(server.url)) for n in range(40)]
            await asyncio.sleep(0)
            for task in waiting[12:]:
                task.cancel()  # who leaves the queue does not use up a turn
            await asyncio.gather(*waiting, return_exceptions=True)
            for fetcher in fetchers:
                await fetcher.close()
            apart = [later - earlier for earlier, later in zip(server.times, server.times[1:])]
            assert len(server.times) == 12
            assert server.times[-1] - server.times[0] >= 11 / 25 - 0.02
            assert min(apart) > 0.02  # 0.04 but for when they arrive
            assert server.times[-1] - server.times[0] < 1.5

    run(check())


def test_the_connection_limit_is_kept_by_all_who_ask_together() -> None:
    async def slowly(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.02)
        return await hello(request)

    async def check() -> None:
        async with answering(slowly) as server:
            fetcher = Fetcher(FetchPolicy(connections=3, **QUICK))
            pages = await asyncio.gather(*(fetcher.fetch(f"{server.url}{n}") for n in range(30)))
            await fetcher.close()
            assert {page.failure for page in pages} == {None}
            assert server.most == 3

    run(check())


def test_robots_are_asked_once_and_obeyed() -> None:
    async def check() -> None:
        robots = "User-agent: *\nDisallow: /private/\nAllow: /private/but-this"
        async with answering(hello, robots=robots) as server:
            fetcher = Fetcher(FetchPolicy(**QUICK))
            names = ["a", "private/b", "private/but-this", "%70rivate/c", "d?private/"]
            pages = await asyncio.gather(*(fetcher.fetch(f"{server.url}{name}") for name in names * 10))
            assert [page.failure for page in pages[:5]] == [None, "robots", None, "robots", None]
            assert server.paths.count("/robots.txt") == 1
            assert fetcher.may_follow([f"{server.url}{name}" for name in names]) == [True, False, True, False, True]
            assert fetcher.may_follow(["http://10.0.0.1/", "http://example.org/x"]) == [False, False]
            await fetcher.close()
            ignored = await fetched(f"{server.url}private/b", obey_robots=False)
            assert ignored.failure is None

    run(check())


def test_while_robots_cannot_be_had_nothing_is_fetched() -> None:
    async def check() -> None:
        async with talking(_answer_503) as server:
            page = await fetched(f"{server.url}page")
            assert (page.failure, page.status) == ("status", 503)
            assert "robots.txt" in page.why

    run(check())


async def _answer_503(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_a_crawl_delay_is_kept() -> None:
    async def check() -> None:
        robots = "User-agent: unidle\nCrawl-delay: 0.2\n\nUser-agent: *\nDisallow: /"
        async with answering(hello, robots=robots, host="127.0.1.12") as server:
            fetcher = Fetcher(FetchPolicy(**QUICK))
            await asyncio.gather(*(fetcher.fetch(f"{server.url}{n}") for n in range(4)))
            await fetcher.close()
            assert server.times[-1] - server.times[0] >= 0.58

    run(check())


def test_one_who_is_cancelled_takes_robots_from_nobody() -> None:
    async def check() -> None:
        async with answering(hello, robots="User-agent: *\nDisallow: /no") as server:
            fetcher = Fetcher(FetchPolicy(**QUICK))
            first = asyncio.create_task(fetcher.fetch(server.url))
            second = asyncio.create_task(fetcher.fetch(server.url))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).failure is None
            await fetcher.close()

    run(check())


def test_cancelled_requests_leave_neither_connections_nor_places_behind() -> None:
    async def check() -> None:
        async with talking(_silence) as silent, answering(hello) as server:
            fetcher = Fetcher(FetchPolicy(connections=2, obey_robots=False))
            for _ in range(5):
                asked = [asyncio.create_task(fetcher.fetch(silent.url)) for _ in range(8)]
                await asyncio.sleep(0.02)
                for task in asked:
                    task.cancel()
                results = await asyncio.gather(*asked, return_exceptions=True)
                assert all(isinstance(result, asyncio.CancelledError) for result in results)
            page = await fetcher.fetch(server.url)
            assert page.failure is None
            assert page.seconds < 1
            await asyncio.sleep(0.05)
            assert silent.now == 0
            assert len(asyncio.all_tasks()) <= 3  # this one, its timer, the server's
            await fetcher.close()

    run(check())


def test_those_of_one_loop_share_a_fetcher_until_the_last_has_left() -> None:
    async def check() -> None:
        one, other = Fetcher.shared(FetchPolicy()), Fetcher.shared(FetchPolicy())
        assert one is other
        assert Fetcher.shared(FetchPolicy(rate=1.0)) is not one
        await one.leave()
        async with answering(hello) as server:
            assert (await other.fetch(server.url)).failure is None
            await other.leave()
            with pytest.raises(RuntimeError, match="closed"):
                await other.fetch(server.url)
        assert Fetcher.shared(FetchPolicy()) is not one

    run(check())


def test_without_aiohttp_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
        Fetcher()


# -- robots.txt itself -------------------------------------------------------------------------------------------------


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
def test_the_longest_rule_decides(rules: str, path: str, allowed: bool) -> None:
    assert Robots.parse(f"User-agent: *\n{rules}", "unidle").allows(path) is allowed


def test_a_crawler_reads_its_own_groups_and_else_everybodys() -> None:
    groups = ("User-Agent: other\nUser-Agent: Unidle/2\nDisallow: /a", "User-agent: *\nDisallow: /b")
    text = "\n\n".join((*groups, "user-agent: unidle\nDisallow: /c"))
    own, others = Robots.parse(text, "unidle"), Robots.parse(text, "else")
    assert [own.allows(path) for path in ("/a", "/b", "/c")] == [False, True, False]
    assert [others.allows(path) for path in ("/a", "/b", "/c")] == [True, False, True]


def test_a_pattern_made_to_be_slow_is_not() -> None:
    robots = Robots.parse("User-agent: *\nDisallow: /" + "*a" * 200 + "b", "unidle")
    began = time.monotonic()
    assert robots.allows("/" + "a" * 2000)
    assert time.monotonic() - began < 0.1
