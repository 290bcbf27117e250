"""The two errors that unidle raises on purpose."""


class UsageError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and exits with 2.
    """


class TrainingError(Exception):
    """Training cannot go on (a non-finite loss, an environment that failed); the last good checkpoint is kept."""
