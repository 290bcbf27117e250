"""A worker process: a few environments, stepped whenever the pool says so.

Started as `python -m unidle.envs.worker <socket>`, not by multiprocessing: it never imports the user's `__main__`, so
scripts without an `if __name__ == "__main__":` guard, notebooks and lambdas all work. It imports no torch. When the
trainer goes, however it goes, the socket closes and the worker ends.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from unidle.envs.block import Block, map_memory
from unidle.envs.slot import EnvSlot
from unidle.errors import UsageError

STEP, DONE, FAILED = b"s", b"d", b"f"


def main() -> None:
    """Serve one pool until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer decides what it means
    pipe = Connection(int(sys.argv[1]))
    try:
        slots = _set_up(cloudpickle.loads(pipe.recv_bytes()))
        _answer(pipe, lambda: None)
        _serve(pipe, slots)
    except (EOFError, ConnectionError, BrokenPipeError):
        pass  # the trainer is gone
    except Exception as error:
        _fail(pipe, error)


def _set_up(job: dict[str, Any]) -> list[EnvSlot]:
    sys.path[:] = job["path"]
    maker, contract = cloudpickle.loads(job["maker"])
    block = Block(contract, job["n_envs"], map_memory(job["memory"]))
    first = job["first_index"]
    return [EnvSlot(maker, first + line, line, job["seed"], contract, block) for line in job["lines"]]


def _serve(pipe: Connection, slots: list[EnvSlot]) -> None:
    while True:
        message = pipe.recv_bytes()
        if message == STEP:
            for slot in slots:
                slot.step()
            pipe.send_bytes(DONE)
            continue
        name, arguments = cloudpickle.loads(message)
        if name == "start":
            _answer(pipe, lambda: [slot.start_episode(int(e)) for slot, e in zip(slots, arguments)])  # noqa: B023
        elif name == "states":
            _answer(pipe, lambda: [slot.state() for slot in slots])
        elif name == "resume":
            _answer(pipe, lambda: [slot.resume(*point) for slot, point in zip(slots, arguments)])  # noqa: B023


def _answer(pipe: Connection, call: Any) -> None:
    pipe.send_bytes(DONE + cloudpickle.dumps(call()))


def _fail(pipe: Connection, error: Exception) -> None:
    """Tell the trainer, in words: an exception of the user's own class may not unpickle there."""
    import traceback

    kind = "usage" if isinstance(error, UsageError) else "failure"
    text = str(error) if kind == "usage" else str(error) or "".join(traceback.format_exception(error))
    try:
        pipe.send_bytes(FAILED + cloudpickle.dumps((kind, text)))
    except OSError:
        pass


if __name__ == "__main__":
    main()
