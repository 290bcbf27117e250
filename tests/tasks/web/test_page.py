"""Parsing web pages: links, text, charsets, size and time limits, word hashes and relevance."""

from __future__ import annotations

import asyncio
import string
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_servers import run

from unidle.errors import UsageError
from unidle.tasks.web import page as pages
from unidle.tasks.web import text_features
from unidle.tasks.web.links import LinkBase, _absolute_cached
from unidle.tasks.web.page import Content, decoded, parse, read
from unidle.tasks.web.page_features import first_words
from unidle.tasks.web.text_features import BUCKETS, Topic, bag, hash_words, words_of

HERE = "http://site.test:8000/folder/page.html?q=1"


def links(html: str, url: str = HERE) -> list[str]:
    return [link.url for link in parse(html.encode(), url).links]


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("href", "target"),
    [
        ("next.html", "http://site.test:8000/folder/next.html"),
        ("/top.html", "http://site.test:8000/top.html"),
        ("../up.html", "http://site.test:8000/up.html"),
        ("../../../../up.html", "http://site.test:8000/up.html"),
        ("a/./b/../c", "http://site.test:8000/folder/a/c"),
        ("?q=2", "http://site.test:8000/folder/page.html?q=2"),
        ("#part", HERE),
        ("", HERE),
        ("next.html#part", "http://site.test:8000/folder/next.html"),
        ("//other.test/x", "http://other.test/x"),
        ("HTTPS://Other.TEST:443/X", "https://other.test/X"),
        ("http://site.test:8000", "http://site.test:8000/"),
        ("http://site.test:8000/a", "http://site.test:8000/a"),
        ("http://site.test:80/a", "http://site.test/a"),
        (" \n/a\tb \r", "http://site.test:8000/ab"),
        ("/a b", "http://site.test:8000/a%20b"),
        ("/ä?ö", "http://site.test:8000/%C3%A4?%C3%B6"),
        ("/a%7eb", "http://site.test:8000/a~b"),
        ("\\a\\b", "http://site.test:8000/a/b"),
        ("http://bücher.test/", "http://xn--bcher-kva.test/"),
        ("mailto:a@b.test", None),
        ("javascript:alert(1)", None),
        ("JaVaScRiPt:alert(1)", None),
        ("data:text/html,x", None),
        ("ftp://site.test/", None),
        ("file:///etc/passwd", None),
        ("tel:123", None),
        ("http://user:secret@site.test/", None),
        ("http://[::1/", None),
        ("http://site.test:99999/", None),
        ("/" + "a" * 3000, None),
    ],
)
def test_links_are_normalised_or_rejected(href: str, target: str | None) -> None:
    assert LinkBase(HERE).absolute(href) == target


@given(
    href=st.text(st.sampled_from(string.ascii_letters[:3] + "AZ09/_-.~?=&+,;%#: \\@"), max_size=12)
    | st.text(max_size=8),
    prefix=st.sampled_from(["", "/", "http://site.test:8000/", "?"]),
)
def test_fast_and_full_link_resolution_agree(href: str, prefix: str) -> None:
    base = LinkBase(HERE)
    assert base.absolute(prefix + href) == base.resolve(prefix + href)


def test_long_urls_are_not_cached() -> None:
    base = LinkBase(HERE)
    _absolute_cached.cache_clear()
    for number in range(10):
        assert base.absolute(f"http://other.test/{'a' * 3000}{number}") is None
        assert base.absolute(f"http://other.test/a#{'b' * 3000}{number}") == "http://other.test/a"
    assert _absolute_cached.cache_info().currsize == 1


def test_links_are_unique_and_in_page_order() -> None:
    html = """<a href="b.html">one</a> <a href="a.html#x">two</a> <a href="a.html#y">again</a>
              <a href="./b.html">again</a> <a>none</a> <a href>here</a> <area href="c.html" alt="map">"""
    found = parse(html.encode(), HERE).links
    assert [(link.url.rpartition("/")[2], link.text) for link in found] == [
        ("b.html", "one"),
        ("a.html", "two"),
        ("page.html?q=1", "here"),
        ("c.html", "map"),
    ]


@pytest.mark.parametrize(
    ("base", "target"),
    [
        ("/other/", "http://site.test:8000/other/x"),
        ("http://moved.test/y/z", "http://moved.test/y/x"),
        ("javascript:alert(1)", "http://site.test:8000/folder/x"),
        ("", "http://site.test:8000/folder/x"),
    ],
)
def test_base_element_sets_the_base_of_relative_links(base: str, target: str) -> None:
    assert links(f'<head><base href="{base}"><base href="/second/"></head><a href="x">x</a>') == [target]


def test_nofollow_is_read_from_links_and_robots_meta() -> None:
    html = '<a href="a" rel="noopener NoFollow">a</a><a href="b" rel="nofollower">b</a><a href="c" rel>c</a>'
    assert [link.nofollow for link in parse(html.encode(), HERE).links] == [True, False, False]
    everywhere = '<meta name="ROBOTS" content="noindex, nofollow">' + html
    assert [link.nofollow for link in parse(everywhere.encode(), HERE).links] == [True, True, True]


# -- text and charsets -------------------------------------------------------------------------------------------------


def test_text_contains_only_the_visible_body() -> None:
    html = """<title> The  Comet
        </title><style>p { comet: 1 }</style><script>comet()</script>
        <p>A <b>comet</b>, the COMET!</p><p>orbit</p>orbit<!-- comet --><noscript>comet</noscript>"""
    content = parse(html.encode(), HERE)
    assert Counter(words_of(content.text)) == {b"a": 1, b"comet": 2, b"the": 1, b"orbit": 2}
    assert content.is_html
    assert not content.is_truncated


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("Größe".encode(), "", "Größe"),
        ("Größe".encode(), "utf-8", "Größe"),
        ("Größe".encode("latin-1"), "iso-8859-1", "Größe"),
        ("Größe".encode("latin-1"), "", "Größe"),
        ("“Größe”".encode("cp1252"), "ISO-8859-1", "“Größe”"),
        ("привет".encode("koi8-r"), "koi8-r", "привет"),
        ("日本".encode("shift_jis"), "Shift_JIS", "日本"),
        (b"\xef\xbb\xbf" + "Größe".encode(), "latin-1", "Größe"),
        ("\ufeffGröße".encode("utf-16-le"), "", "Größe"),
        ("\ufeffGröße".encode("utf-16-be"), "utf-8", "Größe"),
        ('<meta charset="koi8-r">привет'.encode("koi8-r"), "", '<meta charset="koi8-r">привет'),
        ("Größe".encode(), "no-such-charset", "Größe"),
        ("Größe".encode(), "rot13", "Größe"),
        ("Größe".encode(), "zip", "Größe"),
        ("Größe".encode(), "idna", "Größe"),
        ("Größe".encode(), "unicode_escape", "Größe"),
        ("Größe".encode(), "\0", "Größe"),
        ("Größe".encode("latin-1"), "utf-8", "Gr\ufffd\ufffde"),  # wrong charset declared
        ("Größe".encode()[:3], "", "Gr\ufffd"),  # body was cut
        (b"", "", ""),
    ],
)
def test_body_is_decoded_with_the_right_charset(body: bytes, charset: str, text: str) -> None:
    assert decoded(body, charset) == text


@pytest.mark.parametrize(
    ("content_type", "words", "n_links"),
    [
        ("text/html", {b"comet": 1}, 1),
        ("application/xhtml+xml", {b"comet": 1}, 1),
        ("", {b"comet": 1}, 1),
        ("text/plain", {b"a": 2, b"href": 1, b"x": 1, b"comet": 1}, 0),
        ("application/pdf", {}, 0),
        ("image/png", {}, 0),
        ("text/javascript", {}, 0),
    ],
)
def test_only_html_has_links_and_only_text_has_words(content_type: str, words: dict[bytes, int], n_links: int) -> None:
    content = parse(b'<a href="x">comet</a>', HERE, content_type)
    assert (Counter(words_of(content.text)), len(content.links)) == (words, n_links)


# -- broken, huge and slow pages ---------------------------------------------------------------------------------------


@given(body=st.binary(max_size=300) | st.text(st.sampled_from("<>/abhref='\"=!-& \0\n"), max_size=200).map(str.encode))
def test_arbitrary_bytes_are_parsed_without_error(body: bytes) -> None:
    for content_type in ("text/html", "text/plain"):
        assert isinstance(parse(body, HERE, content_type), Content)


def test_too_many_links_are_cut() -> None:
    html = "".join(f'<a href="{n}">{n}</a>' for n in range(100_000)).encode()
    began = time.monotonic()
    content = parse(html, HERE)
    assert time.monotonic() - began < 1
    assert len(content.links) == pages.MAX_LINKS
    assert content.is_truncated


def test_too_many_words_are_cut() -> None:
    content = parse(b"word " * 400_000, HERE)
    assert len(first_words(content.text)) == pages.MAX_WORDS
    assert len(content.text) < 50 * pages.MAX_WORDS
    assert content.is_truncated


@pytest.mark.parametrize(
    "tag", ["<div>", "<ul><li>", "<b>", "<table><tr><td>", "<div></x>", "<a href=x><div>", "<dl><dd>"]
)
def test_deeply_nested_page_is_parsed_in_time(tag: str) -> None:
    began = time.monotonic()
    assert parse((tag * 200_000).encode(), HERE).is_truncated
    assert time.monotonic() - began < 2


def test_slow_page_is_given_up_without_blocking_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_TIMEOUT_SECONDS", 0.3)
    html = ("<a " + " ".join(f"a{n}=1" for n in range(40_000)) + ">x</a>").encode()  # takes the parser seconds

    async def check() -> None:
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - began)

        ticking = asyncio.create_task(tick())
        began = time.monotonic()
        assert await read(html, HERE) is None
        assert time.monotonic() - began < 1.5
        assert longest < 0.25
        ticking.cancel()

    run(check())


def test_links_of_a_large_page_are_read() -> None:
    html = ("<title>t</title><p>comet</p><a href=x>y</a>" + "<p>" + "z" * 100_000).encode()
    content = run(read(html, HERE))
    assert content is not None
    assert [link.url for link in content.links] == ["http://site.test:8000/folder/x"]


def test_missing_selectolax_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "selectolax.lexbor", None)
    with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
        parse(b"<p>", HERE)


# -- words and hashes --------------------------------------------------------------------------------------------------


def test_words_are_lowercase_letters_and_digits_of_any_script() -> None:
    assert words_of("It's 2 COMETS-x_y!") == [b"it", b"s", b"2", b"comets", b"x", b"y"]
    assert words_of("Ärger„Über“ ") == ["ärger".encode(), "über".encode()]
    assert words_of("a b c", 2) == [b"a", b"b"]
    assert words_of("") == []


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=5))
def test_hash_words_hashes_every_word_found(texts: list[str]) -> None:
    words = [(number, word) for number, text in enumerate(texts) for word in words_of(text)]
    found = hash_words(texts)
    assert found.texts.tolist() == [number for number, _ in words]
    assert (found.last - found.before).tolist() == [len(word) for _, word in words]
    assert found.is_number.tolist() == [word.isdigit() for _, word in words]
    alone = [int(hash_words([word.decode()]).hashes[0]) for _, word in words]
    assert found.hashes.tolist() == alone  # independent of the word's position


def test_word_hashes_are_distinct_and_stable_across_runs() -> None:
    words = [f"{first}{last}" for first in string.ascii_letters[:26] for last in range(1000)]
    found = hash_words([" ".join(words)])
    assert len(set(found.hashes.tolist())) == len(words)
    per_bucket = np.bincount(found.buckets, minlength=BUCKETS)
    assert len(per_bucket) == BUCKETS
    assert per_bucket.max() < 25  # 6 on average
    assert hash_words(["comet orbit moon"]).buckets.tolist() == [2526, 3156, 3390]


def test_bag_of_words_has_unit_norm() -> None:
    buckets, counts = np.array([5, 9, 9 + 64]), np.array([1.0, 2.0, 3.0])
    features = bag(buckets, counts, 64)
    assert np.linalg.norm(features) == pytest.approx(1)
    assert np.flatnonzero(features).tolist() == [5, 9]
    assert bag(buckets[:0], counts[:0], 64).tolist() == [0.0] * 64


def test_relevance_grows_with_the_share_of_topic_words() -> None:
    topic = Topic("Comet, orbit")

    def relevance(text: str) -> float:
        return topic.relevance(hash_words([text]))

    assert relevance("comet " * 3 + "x " * 97) == pytest.approx(0.5)
    assert relevance("comet " * 3 + "orbit " * 30) == 1.0
    assert relevance("") == 0.0
    assert Topic(["comet", "orbit"]).words == topic.words
    with pytest.raises(UsageError, match="at least one word"):
        Topic(" ,")


def test_hashing_tolerates_another_thread_with_shorter_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contested(list):  # type: ignore[type-arg]
        """Ignores writes, as if another thread restored its own value right after each."""

        def __setitem__(self, index: object, value: object) -> None:
            pass

    text = "a comet on its orbit " * 1000
    expected = hash_words([text]).hashes
    monkeypatch.setattr(text_features, "_known_powers", Contested([(np.ones(1, np.uint64), np.ones(1, np.uint64))]))
    assert (hash_words([text]).hashes == expected).all()
