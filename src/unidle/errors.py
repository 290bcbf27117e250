"""The errors that unidle raises, and how exceptions of user code become one of them."""

import contextlib
import re
import socket
import traceback
from collections.abc import Iterator

LESS_MEMORY = (
    "use fewer --n-envs, a smaller --batch-size, a smaller --net-arch, fewer --n-steps, or, for SAC and DQN, a "
    "smaller --buffer-size"
)
# How CUDA and cuBLAS report an allocation that did not go through torch's allocator.
_OUT_OF_GPU_MEMORY = re.compile(r"CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)")


class UsageError(Exception):
    """A mistake the user can fix: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


class TrainingError(Exception):
    """Training cannot continue (a non-finite loss, a failing environment); the last good checkpoint is kept."""


class DivergedError(TrainingError):
    """Weights, rewards or observations are NaN or infinite: there is nothing worth saving."""


class WriteError(TrainingError):
    """A file in the run folder cannot be written: `what` is wrong, and the `remedy`."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}." if remedy else what)
        self.what = what


class ResumableError(TrainingError):
    """Training cannot continue, and all of it is saved: `what` is wrong, and how to resume."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(f"{what}\n{how}")
        self.what = what


class AgreedError(Exception):
    """A rank of a data-parallel job ends because of an error that rank 0 reports."""


class LostRankError(Exception):
    """Another rank of a data-parallel job has ended, or has not answered in time."""


# What user code may raise; SystemExit from an environment that calls sys.exit(), which must not end the run as if it
# had succeeded.
USER_EXCEPTIONS = (Exception, SystemExit)


def as_training_error(what: str, error: BaseException) -> Exception:
    """Turn an exception of user code into a TrainingError that says `what` failed, with the traceback.

    Errors that unidle raised itself are returned unchanged.
    """
    if isinstance(error, (UsageError, TrainingError)):
        return error
    if _is_unreachable(error):
        reason = " ".join(str(error).split())
        return TrainingError(f"{what}: it cannot connect ({reason}); start the service, or check its address.")
    details = "".join(traceback.format_exception(error))
    called = f"it called sys.exit({error})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return TrainingError(f"{what}: {called}\n{details}")


def _is_unreachable(error: BaseException) -> bool:
    """Whether a service did not accept the connection, or its host is not known."""
    link: BaseException | None = error
    while link is not None:  # libraries raise their own errors from the system's
        if isinstance(link, (ConnectionRefusedError, socket.gaierror)):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextlib.contextmanager
def wrap_errors(what: str) -> Iterator[None]:
    """Raise exceptions of the block as `as_training_error`."""
    try:
        yield
    except USER_EXCEPTIONS as error:
        raise as_training_error(what, error) from error


@contextlib.contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the GPU into a TrainingError that says what to change."""
    try:
        yield
    except RuntimeError as error:
        import torch  # already loaded by whatever raised

        if not isinstance(error, torch.OutOfMemoryError) and not _OUT_OF_GPU_MEMORY.search(str(error)):
            raise
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        when = f" while allocating {wanted[1]}" if wanted else ""
        raise TrainingError(f"The GPU ran out of memory{when}; stop other programs on it, or {LESS_MEMORY}.") from error
