"""Reads and decompresses a response body incrementally, within a size limit."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from unidle.tasks.web.fetch_policy import FetchError

if TYPE_CHECKING:
    import aiohttp

_BY_HEADER = zlib.MAX_WBITS | 32  # zlib's parameter for gzip or zlib, whichever the first bytes say
_GZIP_MAGIC = b"\x1f\x8b"


async def read_body(response: aiohttp.ClientResponse, limit: int, truncate: bool) -> bytes:
    """Read and decompress a body, never holding more than `limit` bytes; with `truncate`, cut it instead of failing."""
    too_large = FetchError("too_large", f"more than {limit:,} bytes", response.status)
    if (response.content_length or 0) > limit and not truncate:
        raise too_large
    inflater = _inflater(response.headers.get("Content-Encoding", ""))
    parts: list[bytes] = []
    size = sent = 0
    async for chunk in response.content.iter_any():
        sent += len(chunk)
        part = chunk if inflater is None else inflater.decompress(chunk, limit - size + 1)
        parts.append(part)
        size += len(part)
        if max(size, sent) > limit:
            if truncate:
                return b"".join(parts)[:limit]
            raise too_large
    if inflater is not None and sent and not inflater.is_complete:
        raise FetchError("broken", "the compressed body ends too early", response.status, transient=True)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _inflater(encoding: str) -> _Inflater | None:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"Content-Encoding {encoding[:40]!r} was not requested")
    return _Inflater(is_deflate=encoding == "deflate")


class _Inflater:
    """Decompresses gzip, also of several members, and deflate, which some servers send without zlib's header."""

    def __init__(self, is_deflate: bool) -> None:
        self._is_deflate = is_deflate
        self._head = b""  # until it shows whether there is a zlib header
        self._inflate: zlib._Decompress | None = None if is_deflate else zlib.decompressobj(_BY_HEADER)

    @property
    def is_complete(self) -> bool:
        """Whether the compressed data has ended, not just what was received of it."""
        return self._inflate is not None and self._inflate.eof

    def decompress(self, chunk: bytes, limit: int) -> bytes:
        """Return at most `limit` bytes."""
        if self._inflate is None:
            self._head += chunk
            if len(self._head) < 2:
                return b""
            chunk, head = self._head, self._head[:2]
            has_header = head == _GZIP_MAGIC or (int.from_bytes(head) % 31 == 0 and head[0] & 15 == 8)
            self._inflate = zlib.decompressobj(_BY_HEADER if has_header else -zlib.MAX_WBITS)
        found = b""
        while chunk and len(found) < limit:
            if self._inflate.eof:
                if self._is_deflate or not chunk.startswith(_GZIP_MAGIC[: len(chunk)]):
                    break  # padding after the end, which browsers ignore too
                self._inflate = zlib.decompressobj(_BY_HEADER)  # the next member
            found += self._inflate.decompress(chunk, limit - len(found))
            chunk = self._inflate.unused_data
        return found
