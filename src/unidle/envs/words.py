"""Text as numbers: words, hashed bags of them, and how much of a text is about a topic."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from unidle.errors import UsageError

BUCKETS = 4096  # that words are hashed to; narrower bags use the lower bits
FULL_SHARE = 0.06  # of all words, from where on a text is wholly about its topic
_MEMO_WORDS = 200_000  # a site that invents words must not fill the memory

# Bytes of UTF-8 to those of words: letters become small, digits and NUL stay, other ASCII parts words, the rest stays.
_TABLE = bytes(byte if byte >= 0x80 or chr(byte).isalnum() or not byte else 0x20 for byte in bytes(range(256)).lower())
_NO_WORD = re.compile(r"[^\w\0]+")


def words_of(text: str, most: int = -1) -> list[bytes]:
    """The words of a text, in small letters and as UTF-8; at most `most` of them."""
    words = _as_bytes(text).translate(_TABLE).split(None, most)
    return words[:most] if most >= 0 else words


def words_of_each(texts: Iterable[str]) -> list[list[bytes]]:
    """The words of many short texts: of all links of a page, say."""
    return [line.split() for line in _as_bytes("\0".join(texts)).translate(_TABLE, b"\1").split(b"\0")]


def _as_bytes(text: str) -> bytes:
    if not text.isascii():
        text = _NO_WORD.sub(" ", text.lower())
    return text.encode("utf-8", "replace")


class _Buckets(dict[bytes, int]):
    """Computed when first asked for; looked up without a call into Python after that."""

    def __missing__(self, word: bytes) -> int:
        if len(self) >= _MEMO_WORDS:
            self.clear()
        found = self[word] = zlib.crc32(word) % BUCKETS
        return found


# The hash of a word, below BUCKETS; the same in every process.
bucket = _Buckets().__getitem__


def bag(hashes: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """[width] float32 of length 1 (or 0 without words): how often which words, `width` a power of two."""
    sums = np.bincount(hashes & (width - 1), np.log1p(counts), width)
    return (sums / max(float(np.sqrt(sums @ sums)), 1e-9)).astype(np.float32)


class Topic:
    """What is being looked for, as words."""

    def __init__(self, words: Sequence[str] | str) -> None:
        """Words, or a text made of them."""
        text = words if isinstance(words, str) else " ".join(map(str, words))
        self.words = frozenset(words_of(text))
        if not self.words:
            raise UsageError("A topic needs at least one word to look for; give topic='comet orbit telescope'.")

    def of_text(self, counts: Mapping[bytes, int], total: int) -> float:
        """How much a text is about it, 0 to 1."""
        hits = sum(counts.get(word, 0) for word in self.words)
        return min(1.0, hits / (FULL_SHARE * total)) if total else 0.0

    def hits(self, words: Sequence[bytes]) -> int:
        """How many different ones of a few words belong to it."""
        return len(self.words.intersection(words))
