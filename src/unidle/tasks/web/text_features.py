"""Text features: words, hashed bags of words, and the relevance of a text to a topic.

All words of a text are hashed at once by a rolling hash, without extracting them: if C is the cumulative sum of byte ×
P^position, the word from a to b has the hash (C[b] - C[a]) × P^-a modulo 2^64, which does not depend on its position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unidle.errors import UsageError

BUCKETS = 4096  # of the word hash; narrower bags use the lower bits
FULL_SHARE = 0.06  # share of topic words at which relevance reaches 1

# Translates UTF-8 bytes: letters to lower case, other ASCII except digits and NUL to spaces; the rest is unchanged.
_TABLE = bytes(byte if byte >= 0x80 or chr(byte).isalnum() or not byte else 0x20 for byte in bytes(range(256)).lower())
_NO_WORD = re.compile(r"[^\w\0]+")
_P, _MIX = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9)


def words_of(text: str, most: int = -1) -> list[bytes]:
    """Return the words of a text in lower case as UTF-8; at most `most` of them."""
    words = _as_bytes(text).translate(_TABLE, b"\0").split(None, most)
    return words[:most] if most >= 0 else words


def _as_bytes(text: str) -> bytes:
    if not text.isascii():
        text = _NO_WORD.sub(" ", text.lower())
    return text.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class HashedWords:
    """The words of one or several texts, in order."""

    letters: np.ndarray  # [bytes] uint8: words separated by spaces, texts by NUL
    before: np.ndarray  # [words] the position before each word
    last: np.ndarray  # [words] the position of its last letter
    hashes: np.ndarray  # [words] uint64

    def __len__(self) -> int:
        return len(self.hashes)

    def only(self, which: np.ndarray | slice) -> HashedWords:
        """Return the selected words."""
        return HashedWords(self.letters, self.before[which], self.last[which], self.hashes[which])

    @property
    def buckets(self) -> np.ndarray:
        """[words] int64 below BUCKETS."""
        return _bucket(self.hashes)

    @property
    def texts(self) -> np.ndarray:
        """[words] the index of the text that contains each word."""
        return np.searchsorted(np.flatnonzero(self.letters == 0), self.before, "right")

    @property
    def is_number(self) -> np.ndarray:
        """[words] bool, whether a word consists of digits only."""
        others = np.cumsum((self.letters < 0x30) | (self.letters > 0x39), dtype=np.int32)
        return others[self.last] == others[self.before]


def hash_words(texts: Iterable[str]) -> HashedWords:
    """Hash the words of each text, as `words_of` finds them; the same in every process."""
    plain = [text.replace("\0", "") if "\0" in text else text for text in texts]
    letters = np.frombuffer(b" %b " % _as_bytes("\0".join(plain)).translate(_TABLE), np.uint8)
    in_word = letters > 0x20
    edges = np.flatnonzero(in_word[1:] != in_word[:-1])
    before, last = edges[::2], edges[1::2]
    powers, inverse = _powers(len(letters))
    sums = np.cumsum(letters * powers)
    hashes = (sums[last] - sums[before]) * inverse[before]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    return HashedWords(letters, before, last, hashes)


def _bucket(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(52)).astype(np.int64)


_known_powers = [(np.ones(1, np.uint64), np.ones(1, np.uint64))]  # the longest so far


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return P^n and P^-n modulo 2^64 for n in range(count)."""
    powers, inverses = _known_powers[0]  # local: another thread may replace the cached ones
    if len(powers) < count:
        size = 1 << count.bit_length()
        inverse = pow(_P, -1, 1 << 64)
        steps = (np.full(size, factor, np.uint64) for factor in (_P, inverse))
        powers, inverses = (np.concatenate((np.ones(1, np.uint64), np.cumprod(step))) for step in steps)
        _known_powers[0] = powers, inverses
    return powers[:count], inverses[:count]


def bag(buckets: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """[width] float32 bag of words with norm 1 (0 without words); `width` is a power of two."""
    sums = np.bincount(buckets & (width - 1), np.log1p(counts), width)
    return (sums / max(float(np.sqrt(sums @ sums)), 1e-9)).astype(np.float32)


class WordSet:
    """A set of words to look up among hashed words."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self.words = frozenset(words)
        self._hashes = np.sort(hash_words([b" ".join(self.words).decode()]).hashes)
        self._buckets = np.zeros(BUCKETS, np.bool_)  # a fast filter with few false positives
        self._buckets[_bucket(self._hashes)] = True

    def has(self, found: HashedWords) -> np.ndarray:
        """[words] bool, whether each word is in the set."""
        likely = self._buckets[found.buckets]
        at = np.flatnonzero(likely)
        hashes = found.hashes[at]
        likely[at] = self._hashes[np.searchsorted(self._hashes[:-1], hashes)] == hashes
        return likely


class Topic(WordSet):
    """The words of a topic."""

    def __init__(self, words: Sequence[str] | str) -> None:
        """`words`: a sequence of words, or a text."""
        super().__init__(words_of(words if isinstance(words, str) else " ".join(map(str, words))))
        if not self.words:
            raise UsageError("A topic needs at least one word, such as topic='comet orbit telescope'.")

    def relevance(self, text: HashedWords) -> float:
        """Return the relevance of a text, 0 to 1."""
        hits = int(np.count_nonzero(self.has(text)))
        return min(1.0, hits / (FULL_SHARE * len(text))) if len(text) else 0.0
