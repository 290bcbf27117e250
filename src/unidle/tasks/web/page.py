"""What a page says and where it leads. Nothing of it is ever executed; what is broken is read as far as it goes.

Parsing is in C and quick, but there are pages made to be slow: time goes with the square of how deep elements are
nested, and of how many attributes one has. So only the first tags of a page count, and a page that is large enough to
take long all the same is parsed in a thread (the parser lets go of the GIL), and given up after a while.
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

MAX_WORDS = 1000  # that are counted, from the top of the page: enough to tell what it is about
MAX_LINKS = 1000
_MAX_TEXT = 40 * MAX_WORDS
MAX_TAGS = 10_000  # parsed in 0.15 s, however they are nested
MAX_BYTES = 512_000
_TEXT = 200  # characters kept of a link's text
_AT_ONCE_BYTES = 65_536  # up to here, half a second is the worst that any page was seen to take
_PATIENCE_SECONDS = 5.0
_AT_A_TIME = 2  # large pages: one that never ends must not take all cores

_HTML = ("text/html", "application/xhtml+xml")
_UNSEEN = ["script", "style", "noscript", "template"]
_DECLARED = re.compile(rb"<meta[^>]{1,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.\-]{2,40})", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
# Python knows encodings that are none of text (zip, rot13) or cost dearly (idna, punycode): these are the web's.
_CHARSETS = re.compile(
    r"utf-8|utf-16(-[lb]e)?|cp(125\d|866|874|932|949)|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)|tis-620"
    r"|gb2312|gbk|gb18030|big5(hkscs)?|euc_(jp|kr)|shift_jis|iso2022_jp"
)


class Link(NamedTuple):
    """Where a page leads."""

    url: str
    text: str
    nofollow: bool  # the page does not vouch for it


@dataclass(frozen=True, slots=True)
class Content:
    """What was found on a page."""

    text: str = ""  # as much as may be needed for MAX_WORDS words
    links: list[Link] = field(default_factory=list)  # no address twice
    is_html: bool = False
    is_cut: bool = False  # there was more than is read of one page


async def read(body: bytes, url: str, content_type: str = "text/html", charset: str = "") -> Content | None:
    """`parse`, without keeping others waiting; None for a page that takes too long."""
    if len(body) <= _AT_ONCE_BYTES or content_type not in _HTML:
        return parse(body, url, content_type, charset)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Content | None] = loop.create_future()

    def tell(content: Content | None) -> None:
        if not answer.done():
            answer.set_result(content)

    def work() -> None:
        with _slow:
            if answer.done():  # given up while others had their turn
                return
            content = None
            try:
                content = parse(body, url, content_type, charset)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                    loop.call_soon_threadsafe(tell, content)

    # A daemon, unlike an executor's thread: nobody waits for it when the program ends.
    threading.Thread(target=work, name="large page", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, _PATIENCE_SECONDS)
    except TimeoutError:
        return None


_slow = threading.BoundedSemaphore(_AT_A_TIME)


def parse(body: bytes, url: str, content_type: str = "text/html", charset: str = "") -> Content:
    """What is on a page that came from `url`; of anything but HTML and plain text, nothing."""
    if content_type and content_type not in _HTML and content_type != "text/plain":
        return Content()
    is_cut = len(body) > MAX_BYTES
    body = body[:MAX_BYTES]
    if content_type == "text/plain":
        return Content(text=decoded(body, charset)[:_MAX_TEXT], is_cut=is_cut)
    # The parser takes UTF-8. ASCII is that already, whatever it was said to be, but for UTF-16 and escapes (ISO 2022).
    is_plain = body.isascii() and b"\x1b" not in body and not (_known(charset) or "").startswith("utf-16")
    return _parse_html(body if is_plain else decoded(body, charset).encode("utf-8", "replace"), url, is_cut)


def decoded(body: bytes, charset: str = "") -> str:
    """The text in these bytes: by their mark, else as the header, else as the page itself says, else as it looks."""
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    known = _known(charset)
    if known is None:
        declared = _DECLARED.search(body, 0, 4096)
        known = _known(declared[1].decode("ascii")) if declared else None
        if known is not None and known.startswith("utf-16"):
            known = "utf-8"  # it could not have been read, were it true
    if known is not None:
        return body.decode(known, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        # A body that was cut may end within a character; one with strange bytes before that was never UTF-8.
        return body.decode("utf-8" if error.reason == "unexpected end of data" else "cp1252", "replace")


def _known(charset: str) -> str | None:
    """Python's name of an encoding of the web."""
    try:
        name = codecs.lookup(charset).name if charset.isascii() and charset else ""
    except (LookupError, ValueError):
        return None
    if name in ("iso8859-1", "ascii"):
        return "cp1252"  # as browsers do
    return name if _CHARSETS.fullmatch(name) else None


def _parse_html(html: bytes, url: str, is_cut: bool) -> Content:
    if html.count(b"<") > MAX_TAGS:
        html, is_cut = _first_tags(html), True
    tree = _parser()(html)
    tree.strip_tags(_UNSEEN)
    root = tree.body or tree.root
    return Content(
        text=root.text(separator=" ")[:_MAX_TEXT] if root is not None else "",
        links=_links(tree, url),
        is_html=True,
        is_cut=is_cut,
    )


def _links(tree: Any, url: str) -> list[Link]:
    base = LinkBase(url)
    selected = "a"
    if tree.css_first("base, area, frame") is not None:  # rare, and to look for them by themselves takes longer
        selected = "a[href], area[href], frame[src]"
    declared = tree.css_first("base[href]") if selected != "a" else None
    if declared is not None:
        moved = base.absolute(declared.attributes["href"] or "")
        base = LinkBase(moved) if moved is not None else base
    robots = tree.css_first("meta[name=robots i]")
    none_vouched = robots is not None and _says_nofollow(robots.attributes.get("content"))
    found: dict[str, Link] = {}
    for node in tree.css(selected):
        attributes = node.attributes
        if selected == "a" and "href" not in attributes:
            continue
        target = base.absolute(attributes.get("href") or attributes.get("src") or "")
        if target is None or target in found:
            continue
        text = node.text(separator=" ") or attributes.get("title") or attributes.get("alt") or ""
        nofollow = none_vouched or ("rel" in attributes and _says_nofollow(attributes["rel"]))
        found[target] = Link(target, _tidy(text), nofollow)
        if len(found) == MAX_LINKS:
            break
    return list(found.values())


def _says_nofollow(text: str | None) -> bool:
    return text is not None and "nofollow" in re.split(r"[\s,]+", text.lower())


def _tidy(text: str) -> str:
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
        raise UsageError("Environments on the web need two packages; run: pip install 'unidle[web]'.") from None
    return LexborHTMLParser
