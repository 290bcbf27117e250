"""Output that cannot be written is dropped, and never raises."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import SOURCE
from rich.console import Console

from unidle.output import guarded_output, output_is_lost


def broken_pipe() -> io.TextIOWrapper:
    """A text stream to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(os.fdopen(writer, "wb"), line_buffering=True)


def full_disk() -> io.TextIOWrapper:
    return Path("/dev/full").open("w", buffering=1)


def closed() -> io.TextIOWrapper:
    with Path(os.devnull).open("w") as stream:
        return stream


@pytest.mark.parametrize("opened", [broken_pipe, full_disk, closed, lambda: None])
def test_failed_writes_are_dropped(
    opened: Callable[[], io.TextIOWrapper | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened()  # None: Python found it closed when it started
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with guarded_output():
        for _ in range(3):
            print("text", flush=True)
            print("text", file=sys.stderr)
            sys.stdout.writelines(["one\n", "two\n"])
            Console().print("by rich")
            Console(stderr=True).print("by rich")
        assert output_is_lost() == (stream is not None)
    assert sys.stdout is stream
    with contextlib.suppress(OSError):
        if stream is not None:
            stream.close()


def test_characters_missing_in_the_encoding_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    with guarded_output():
        print("1 → 2")
        assert not output_is_lost()
    assert raw.getvalue() == b"1 ? 2\n"


def test_slow_reader_of_non_blocking_pipe_loses_text_but_not_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader, "rb", buffering=0) as read_end, os.fdopen(writer, "wb", buffering=0) as raw:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
        with guarded_output():
            for _ in range(100):
                print("x" * 10_000)
            assert not output_is_lost()
        read_end.read(65536)


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-", "| true"])
def test_exit_code_is_that_of_the_program(redirection: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
            import os, sys, time
            from unidle.output import guard_output
            guard_output()
            os.open(os.devnull, os.O_RDONLY)  # must not become standard output
            time.sleep(0.2)  # by then `true` has exited
            for _ in range(100):
                print("x" * 1000)
                print("x" * 1000, file=sys.stderr)
            sys.exit(7)
        """)
    )
    shell = f"{{ {sys.executable} program.py; echo $? > code; }} {redirection}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, timeout=30)
    assert (tmp_path / "code").read_text() == "7\n"
