"""Damaged copies of a file: flipped bits, cut ends, swapped blocks, zeroed ranges, pieces of others, edited headers.

Of a text also: inserted bytes, other values, lost and doubled lines.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence

TRIES = int(os.environ.get("UNIDLE_FUZZ_TRIES", "60"))

_TOKENS = (
    b"\xff",
    b"null",
    b"[" * 3000,
    b"{}",
    b"NaN",
    b"1e999",
    b"*a",
    b"&a ",
    b"!!int x",
    b"\x00",
    b"- ",
    b": ",
    b"\n",
)
_VALUES = (
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"-1e999",
    b"NaN",
    b".inf",
    b"9" * 30,
    b"9" * 5000,
    b"1:30:00",
    b'""',
    b"[]",
    b"{}",
    b"[[[1]]]",
    b"[" * 2000 + b"]" * 2000,
    b'{"a": {"a": {}}}',
    b"*a",
    b"&a [*a, *a]",
    b"!!python/object/apply:os.system [true]",
    b"!!binary 1",
    b"2024-01-01",
    b"\xff\xfe",
    "ß→\U0001f600".encode(),
    b'"\\ud800"',
    b"0x10",
    b"1_000",
)
_HEADERS = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"\nunidle\x02")
_HEADER_BYTES = 48

Kind = Callable[[bytearray, random.Random, Sequence[bytes]], bytearray]


def mutations(content: bytes, tries: int = TRIES, *, is_text: bool = False) -> Iterator[tuple[str, bytes]]:
    """`tries` damaged copies of `content`, each with a description that reproduces it; all differ from `content`."""
    kinds = [_flip, _cut, _swap, _zero] + [_insert] * (2 * is_text)
    for seed in range(tries):
        kind = kinds[seed % len(kinds)]
        yield f"{kind.__name__[1:]} with seed {seed}", _damaged(content, kind, random.Random(seed))


def damaged(
    content: bytes, rng: random.Random, others: Sequence[bytes] = (), *, is_text: bool = False
) -> tuple[str, bytes]:
    """The kind of damage and a damaged copy of `content`, in which there may be pieces of `others`."""
    kinds: list[Kind] = [_flip, _cut, _swap, _zero, *([_insert, _value, _value, _lines] if is_text else [_header])]
    kind = rng.choice([*kinds, *([_piece] if others else [])])
    return kind.__name__[1:], _damaged(content, kind, rng, others)


def _damaged(content: bytes, kind: Kind, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    found = content
    while found == content:
        found = bytes(kind(bytearray(content), rng, others))
    return found


def _flip(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    for _flipped in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _cut(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    return data[: rng.choice([rng.randrange(len(data)), len(data) - rng.randrange(1, 60)])]


def _swap(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    size = rng.choice([1, 16, 64, 512])
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return data


def _zero(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    start, size = rng.randrange(len(data)), rng.choice([1, 8, 512, 4096])
    data[start : start + size] = bytes(len(data[start : start + size]))
    return data


def _insert(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data))
    data[at:at] = rng.choice(_TOKENS)
    return data


def _piece(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    """A part of another file, at its place there or elsewhere; in one case of five all but the end."""
    other = rng.choice(others)
    if rng.random() < 0.2:
        end = rng.randrange(1, 60)
        return bytearray(other[:-end]) + data[-end:]
    size, start = rng.choice([64, 512, 4096, len(other)]), rng.randrange(len(other))
    at = rng.choice([start, rng.randrange(len(data))])
    data[at : at + size] = other[start : start + size]
    return data


def _header(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    """Other bytes in a header of the zip archive or in the trailer."""
    places = [match.start() for header in _HEADERS for match in re.finditer(re.escape(header), data)]
    at = rng.choice(places)
    for _changed in range(rng.choice([1, 4])):
        place = at + rng.randrange(_HEADER_BYTES)
        data[min(place, len(data) - 1)] = rng.randrange(256)
    return data


def _value(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    """Another value after a colon or in a list."""
    found = rng.choice(list(re.finditer(rb"(?:(?<=: )|(?<=- ))[^,\n}]+|(?<=:)(?=\n)", data)))
    data[found.start() : found.end()] = rng.choice([b"", b" "]) + rng.choice(_VALUES)
    return data


def _lines(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> bytearray:
    """A line that is lost, doubled, cut short or moved."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    line = lines.pop(at)
    what = rng.randrange(4)
    if what == 1:
        lines[at:at] = [line, line]
    elif what == 2:
        lines.insert(at, line[: rng.randrange(len(line) + 1)])
    elif what == 3:
        lines.insert(rng.randrange(len(lines) + 1), line)
    return bytearray(b"\n").join(lines)
