"""An evaluator's process: tied to the trainer's life from its first moment on, before it imports what takes seconds."""

from __future__ import annotations

import contextlib
import os
import sys

from unidle.subprocesses import end_with_trainer

_NICENESS = 10  # where both want a core, training gets nine tenths of it


def main() -> None:
    """Serve one trainer until it hangs up."""
    end_with_trainer()
    os.nice(_NICENESS)
    from multiprocessing.connection import Connection

    import cloudpickle

    from unidle.engine.evaluate.play import Stopped
    from unidle.engine.evaluate.worker import EvaluationJob, Evaluator
    from unidle.envs.pool.worker import error_message

    pipe = Connection(int(sys.argv[1]))
    try:
        job: EvaluationJob = cloudpickle.loads(pipe.recv_bytes())
        if os.getppid() != job.trainer:
            return  # it was gone before this process was tied to it
        sys.path[:] = job.path
        with contextlib.closing(Evaluator(job)) as evaluator:
            evaluator.serve(pipe)
    except (EOFError, ConnectionError, Stopped):
        pass  # the trainer is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(error_message(error))


if __name__ == "__main__":
    main()
