"""The command line: one file per command."""

import sys

try:
    from unidle.cli.main import main
except KeyboardInterrupt:  # Ctrl-C in the first moments of a command
    sys.stderr.write("unidle: Stopped before it began.\n")
    sys.exit(130)

__all__ = ["main"]
