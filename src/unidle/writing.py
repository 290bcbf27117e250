"""Writes the files of a run folder: whole or not at all, and never through a link that someone put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from unidle.errors import UsageError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write to a new file, which replaces `path` (or the link there) once it is complete and on the disk.

    After an error, `path` is unchanged.
    """
    # With the process id: two processes that write a report at the same time do not mix theirs up.
    temporary = path.parent / f"{path.stem}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # x: never an existing file, nor through a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a small file so that a reader sees the old one or the complete new one; returns `path`.

    Half of a surrogate pair, as in the name of a file that is not UTF-8, becomes its escape sequence.
    """
    with replacing(path) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return path


def open_to_append(path: Path) -> IO[str]:
    """Open a text file for appending, or create it; UsageError if it is a link."""
    refuse_link(path)
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def refuse_link(path: Path) -> None:
    """UsageError if `path` is a link: writing there would change something outside the run folder."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link, and a run is written to its own folder only; remove the link.")


def remove_link(path: Path) -> Path:
    """Remove `path` if it is a link, before another library writes a file there; returns `path`."""
    if path.is_symlink():
        path.unlink()
    return path
