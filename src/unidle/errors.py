"""The errors that unidle raises on purpose, and how any other one is passed on."""

import contextlib
import re
import traceback
from collections.abc import Iterator

LESS_MEMORY = (
    "take fewer --n-envs, a smaller --batch-size, a smaller --net-arch, fewer --n-steps, or, for SAC and DQN, a "
    "smaller --buffer-size"
)
# What CUDA and its library of products say themselves, of memory that torch did not ask for.
_OUT_OF_GPU_MEMORY = re.compile(r"CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)")


class UsageError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and exits with 2.
    """


class TrainingError(Exception):
    """Training cannot go on (a non-finite loss, an environment that failed); the last good checkpoint is kept."""


class WriteError(TrainingError):
    """A file of the run cannot be written."""


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


@contextlib.contextmanager
def gpu_memory_told() -> Iterator[None]:
    """Where a training job runs out of GPU memory, a TrainingError that says what to do about it."""
    try:
        yield
    except RuntimeError as error:
        import torch  # who got here has it; others do without

        if not isinstance(error, torch.OutOfMemoryError) and not _OUT_OF_GPU_MEMORY.search(str(error)):
            raise
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        when = f" when {wanted[1]} more were needed" if wanted else ""
        raise TrainingError(f"The GPU ran out of memory{when}; end what else uses it, or {LESS_MEMORY}.") from error
