"""The body of a response, unpacked as it comes, and never more of it held than a limit allows."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from unidle.tasks.web.fetch_policy import FetchError

if TYPE_CHECKING:
    import aiohttp


async def read_body(response: aiohttp.ClientResponse, limit: int, cut: bool) -> bytes:
    """A body, unpacked; never more than `limit` bytes of it are held, whatever was packed into them."""
    too_large = FetchError("too_large", f"more than {limit:,} bytes", response.status)
    if (response.content_length or 0) > limit and not cut:
        raise too_large
    unpack = _unpacker(response.headers.get("Content-Encoding", ""))
    parts: list[bytes] = []
    size = sent = 0
    async for chunk in response.content.iter_any():
        sent += len(chunk)
        part = chunk if unpack is None else unpack(chunk, limit - size + 1)
        parts.append(part)
        size += len(part)
        if max(size, sent) > limit:
            if cut:
                return b"".join(parts)[:limit]
            raise too_large
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes] | None:
    """(chunk, most) → at most so many bytes unpacked."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"packed as {encoding[:40]!r}, which was not asked for")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its first bytes

    def unpack(chunk: bytes, most: int) -> bytes:
        nonlocal inflate
        try:
            return inflate.decompress(chunk, most)
        except zlib.error:
            if encoding != "deflate":
                raise
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)  # some send it bare
            return inflate.decompress(chunk, most)

    return unpack
