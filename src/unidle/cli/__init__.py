"""The command line: one thin function per command, in `commands`."""

from unidle.cli.main import main

__all__ = ["main"]
