"""Parses the text and links of a page. Nothing is executed, and broken HTML is parsed as far as possible.

The parser is written in C and fast, but malicious pages can slow it down: its time is quadratic in the nesting depth
and in the number of attributes. So only the first tags of a page are parsed, and a large page is parsed in a thread
(the parser releases the GIL) with a timeout.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unidle.errors import UsageError
from unidle.tasks.web.links import LinkBase

MAX_WORDS = 1000  # from the top of the page: enough for its topic
MAX_LINKS = 1000
_MAX_TEXT = 40 * MAX_WORDS
MAX_TAGS = 10_000  # parsed in 0.15 s for any nesting
MAX_BYTES = 512_000
_TEXT = 200  # characters of a link's text
_INLINE_BYTES = 65_536  # parsed without a thread: at worst half a second
_TIMEOUT_SECONDS = 5.0
_MAX_THREADS = 2  # large pages: slow ones must not occupy all cores

_HTML = ("text/html", "application/xhtml+xml")
_SKIPPED_TAGS = ["script", "style", "noscript", "template"]
_DECLARED = re.compile(rb"<meta[^>]{1,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.\-]{2,40})", re.IGNORECASE)
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
# Encodings used on the web; Python also knows some that are not text (zip, rot13) or slow (idna, punycode).
_CHARSETS = re.compile(
    r"utf-8|utf-16(-[lb]e)?|cp(125\d|866|874|932|949)|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)|tis-620"
    r"|gb2312|gbk|gb18030|big5(hkscs)?|euc_(jp|kr)|shift_jis|iso2022_jp"
)


class Link(NamedTuple):
    """A link of a page."""

    url: str
    text: str
    nofollow: bool  # rel=nofollow, or the page's robots meta tag


@dataclass(frozen=True, slots=True)
class Content:
    """The parsed content of a page."""

    text: str = ""  # enough for MAX_WORDS words
    links: list[Link] = field(default_factory=list)  # no duplicate URLs
    is_html: bool = False
    is_truncated: bool = False  # the page exceeds the limits and was truncated


async def read(body: bytes, url: str, content_type: str = "text/html", charset: str = "") -> Content | None:
    """`parse` without blocking the event loop; None if it takes too long."""
    if len(body) <= _INLINE_BYTES or content_type not in _HTML:
        return parse(body, url, content_type, charset)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Content | None] = loop.create_future()

    def set_result(content: Content | None) -> None:
        if not answer.done():
            answer.set_result(content)

    def work() -> None:
        with _slow:
            if answer.done():  # timed out while waiting for the semaphore
                return
            content = None
            try:
                content = parse(body, url, content_type, charset)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                    loop.call_soon_threadsafe(set_result, content)

    # A daemon, unlike an executor's thread: the program can exit while it runs.
    threading.Thread(target=work, name="large page", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, _TIMEOUT_SECONDS)
    except TimeoutError:
        return None


_slow = threading.BoundedSemaphore(_MAX_THREADS)


def parse(body: bytes, url: str, content_type: str = "text/html", charset: str = "") -> Content:
    """Parse a page from `url`; empty for anything but HTML and plain text."""
    if content_type and content_type not in _HTML and content_type != "text/plain":
        return Content()
    is_truncated = len(body) > MAX_BYTES
    body = body[:MAX_BYTES]
    if content_type == "text/plain":
        return Content(text=decoded(body, charset)[:_MAX_TEXT], is_truncated=is_truncated)
    # The parser needs UTF-8. ASCII bytes are valid UTF-8, except in UTF-16 and with ISO 2022 escapes.
    is_plain = body.isascii() and b"\x1b" not in body and not (_known(charset) or "").startswith("utf-16")
    return _parse_html(body if is_plain else decoded(body, charset).encode("utf-8", "replace"), url, is_truncated)


def decoded(body: bytes, charset: str = "") -> str:
    """Decode by byte order mark, else by the header's charset, else by the page's meta tag, else by guessing."""
    for mark, name in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    known = _known(charset)
    if known is None:
        declared = _DECLARED.search(body, 0, 4096)
        known = _known(declared[1].decode("ascii")) if declared else None
        if known is not None and known.startswith("utf-16"):
            known = "utf-8"  # the tag could not have been found in UTF-16
    if known is not None:
        return body.decode(known, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        # A truncated body may end within a character; invalid bytes earlier mean that it is not UTF-8.
        return body.decode("utf-8" if error.reason == "unexpected end of data" else "cp1252", "replace")


def _known(charset: str) -> str | None:
    """Python's name for an encoding of the web; None for others."""
    try:
        name = codecs.lookup(charset).name if charset.isascii() and charset else ""
    except (LookupError, ValueError):
        return None
    if name in ("iso8859-1", "ascii"):
        return "cp1252"  # as browsers do
    return name if _CHARSETS.fullmatch(name) else None


def _parse_html(html: bytes, url: str, is_truncated: bool) -> Content:
    if html.count(b"<") > MAX_TAGS:
        html, is_truncated = _first_tags(html), True
    tree = _parser()(html)
    tree.strip_tags(_SKIPPED_TAGS)
    root = tree.body or tree.root
    return Content(
        text=root.text(separator=" ")[:_MAX_TEXT] if root is not None else "",
        links=_links(tree, url),
        is_html=True,
        is_truncated=is_truncated,
    )


def _links(tree: Any, url: str) -> list[Link]:
    base = LinkBase(url)
    selected = "a"
    if tree.css_first("base, area, frame") is not None:  # rare, and a selector for all of them is slower
        selected = "a[href], area[href], frame[src]"
    declared = tree.css_first("base[href]") if selected != "a" else None
    if declared is not None:
        moved = base.absolute(declared.attributes["href"] or "")
        base = LinkBase(moved) if moved is not None else base
    robots = tree.css_first("meta[name=robots i]")
    all_nofollow = robots is not None and _says_nofollow(robots.attributes.get("content"))
    found: dict[str, Link] = {}
    for node in tree.css(selected):
        attributes = node.attributes
        if selected == "a" and "href" not in attributes:
            continue
        target = base.absolute(attributes.get("href") or attributes.get("src") or "")
        if target is None or target in found:
            continue
        text = node.text(separator=" ") or attributes.get("title") or attributes.get("alt") or ""
        nofollow = all_nofollow or ("rel" in attributes and _says_nofollow(attributes["rel"]))
        found[target] = Link(target, _one_line(text), nofollow)
        if len(found) == MAX_LINKS:
            break
    return list(found.values())


def _says_nofollow(text: str | None) -> bool:
    return text is not None and "nofollow" in re.split(r"[\s,]+", text.lower())


def _one_line(text: str) -> str:
    return " ".join(text.split(None, _TEXT))[:_TEXT]


def _first_tags(html: bytes) -> bytes:
    at = -1
    for _ in range(MAX_TAGS):
        at = html.index(b"<", at + 1)
    return html[:at]


def _parser() -> Any:
    try:
        from selectolax.lexbor import LexborHTMLParser
    except ImportError:
        raise UsageError("Web environments need extra packages; run: pip install 'unidle[web]'.") from None
    return LexborHTMLParser
