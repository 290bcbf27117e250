"""The two errors that unidle raises on purpose, and how any other one is passed on."""

import contextlib
import traceback
from collections.abc import Iterator


class UsageError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and exits with 2.
    """


class TrainingError(Exception):
    """Training cannot go on (a non-finite loss, an environment that failed); the last good checkpoint is kept."""


def failure_of(what: str, error: Exception) -> Exception:
    """What to raise for an exception in the user's code: a TrainingError that says `what` failed, with the traceback.

    An error that unidle raised itself is its own best description.
    """
    if isinstance(error, (UsageError, TrainingError)):
        return error
    details = "".join(traceback.format_exception(error))
    return TrainingError(f"{what}: {type(error).__name__}: {error}\n{details}")


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """`failure_of` as a block."""
    try:
        yield
    except Exception as error:
        raise failure_of(what, error) from error
