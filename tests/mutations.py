"""Damaged copies of a file: flipped bits, cut ends, swapped blocks, zeroed ranges, inserted bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

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


def mutations(content: bytes, tries: int = TRIES, *, is_text: bool = False) -> Iterator[tuple[str, bytes]]:
    """`tries` damaged copies of `content`, each with a description that reproduces it; all differ from `content`."""
    kinds = [_flip, _cut, _swap, _zero] + [_insert] * (2 * is_text)
    for seed in range(tries):
        kind, rng = kinds[seed % len(kinds)], random.Random(seed)
        damaged = content
        while damaged == content:
            damaged = bytes(kind(bytearray(content), rng))
        yield f"{kind.__name__[1:]} with seed {seed}", damaged


def _flip(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.choice([rng.randrange(len(data)), len(data) - rng.randrange(1, 60)])]


def _swap(data: bytearray, rng: random.Random) -> bytearray:
    size = rng.choice([1, 16, 64, 512])
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return data


def _zero(data: bytearray, rng: random.Random) -> bytearray:
    start, size = rng.randrange(len(data)), rng.choice([1, 8, 512, 4096])
    data[start : start + size] = bytes(len(data[start : start + size]))
    return data


def _insert(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    data[at:at] = rng.choice(_TOKENS)
    return data
