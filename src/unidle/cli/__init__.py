"""The command line: one file per command."""

from unidle.cli.main import main

__all__ = ["main"]
