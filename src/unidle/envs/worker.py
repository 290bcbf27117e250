"""A worker process: a few environments, stepped whenever the pool says so.

Started as `python -m unidle.envs.worker <socket>`, not by multiprocessing: it never imports the user's `__main__`, so
scripts without an `if __name__ == "__main__":` guard, notebooks and lambdas all work. It imports no torch. When the
trainer goes, however it goes, the socket closes and the worker ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from unidle.envs.block import Block, map_memory
from unidle.envs.serial import SerialEnvs
from unidle.errors import UsageError

STEP, DONE, FAILED = b"s", b"d", b"f"


def main() -> None:
    """Serve one pool until it hangs up."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # these may reach the whole group; the trainer decides what they mean
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    try:
        envs = _make_envs(cloudpickle.loads(pipe.recv_bytes()))
        with contextlib.closing(envs):
            _serve(pipe, envs)
    except (EOFError, ConnectionError):
        pass  # the trainer is gone
    except Exception as error:
        _fail(pipe, error)


def _make_envs(job: dict[str, Any]) -> SerialEnvs:
    sys.path[:] = job["path"]
    maker, contract = cloudpickle.loads(job["cargo"])
    block = Block(contract, job["block_envs"], map_memory(job["memory"]))
    first = job["first_line"]
    return SerialEnvs(maker, contract, job["n_envs"], job["seed"], job["first_index"] + first, block, first)


def _serve(pipe: Connection, envs: SerialEnvs) -> None:
    pipe.send_bytes(DONE + cloudpickle.dumps(None))
    while True:
        message = pipe.recv_bytes()
        if message == STEP:
            envs.recv()
            pipe.send_bytes(DONE)
        else:  # start, states or resume: rare, so plainly pickled
            method, arguments = cloudpickle.loads(message)
            pipe.send_bytes(DONE + cloudpickle.dumps(getattr(envs, method)(*arguments)))


def _fail(pipe: Connection, error: Exception) -> None:
    """Tell the trainer, in words: an exception of the user's own class may not unpickle there."""
    import traceback

    kind = "usage" if isinstance(error, UsageError) else "failure"
    text = str(error) if kind == "usage" else str(error) or "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        pipe.send_bytes(FAILED + cloudpickle.dumps((kind, text)))


if __name__ == "__main__":
    main()
