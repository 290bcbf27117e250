"""Reads and decompresses a response body incrementally, within a size limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from unidle.tasks.web.fetch_policy import FetchError

if TYPE_CHECKING:
    import aiohttp


async def read_body(response: aiohttp.ClientResponse, limit: int, cut: bool) -> bytes:
    """Read and decompress a body, never holding more than `limit` bytes; with `cut`, truncate it instead of failing."""
    too_large = FetchError("too_large", f"more than {limit:,} bytes", response.status)
    if (response.content_length or 0) > limit and not cut:
        raise too_large
    decompress = _decompressor(response.headers.get("Content-Encoding", ""))
    parts: list[bytes] = []
    size = sent = 0
    async for chunk in response.content.iter_any():
        sent += len(chunk)
        part = chunk if decompress is None else decompress(chunk, limit - size + 1)
        parts.append(part)
        size += len(part)
        if max(size, sent) > limit:
            if cut:
                return b"".join(parts)[:limit]
            raise too_large
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompressor(encoding: str) -> Callable[[bytes, int], bytes] | None:
    """Return a function (chunk, limit) → at limit that many decompressed bytes; None if there is no compression."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"Content-Encoding {encoding[:40]!r} was not requested")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its first bytes

    def decompress(chunk: bytes, limit: int) -> bytes:
        nonlocal inflate
        try:
            return inflate.decompress(chunk, limit)
        except zlib.error:
            if encoding != "deflate":
                raise
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)  # some servers send raw deflate
            return inflate.decompress(chunk, limit)

    return decompress
