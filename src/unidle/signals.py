"""The signals that stop a run, and handlers for them that forked children do not inherit.

An environment may fork processes (multiprocessing) and terminate them: with the trainer's handlers, or a worker's, they
would not end. A signal that arrives at a child just after the fork waits until its handlers are reset.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Ctrl-C; kill, SLURM and other schedulers; a terminal that is closed; `sbatch --signal=USR1@60`.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Handlers = dict[int, Any]
_replaced: list[Handlers] = []  # what `handle` replaced, oldest first
_forking = threading.local()  # the signal mask to restore


def handle(numbers: Iterable[int], handler: Callable[..., Any]) -> Handlers:
    """Install a handler, until `restore` and not in forked children; returns those that it replaces."""
    before = {number: signal.signal(number, handler) for number in numbers}
    _replaced.append(before)
    return before


def restore(before: Handlers) -> None:
    """Install the handlers that `handle` replaced."""
    _replaced.remove(before)
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Hold back the signals that stop a run during a block; a process that it starts begins with them held back."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_stopping() -> None:
    """Ignore the signals that stop a run, which may go to the whole process group: the trainer handles them."""
    # An empty handler instead of SIG_IGN, which processes that an environment starts would inherit. What is ignored
    # already (SIGHUP under nohup) stays ignored in them too.
    handle([number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN], lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # see `blocked`


def _before_fork() -> None:
    held_back = STOPPING if _replaced else ()
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    while _replaced:
        restore(_replaced[-1])
    arrived = signal.sigpending()
    try:
        _after_fork()
    except BaseException:  # a handler raises, as Python's does on Ctrl-C; what a hook raises is ignored
        number = min(arrived & set(STOPPING), default=signal.SIGINT)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
