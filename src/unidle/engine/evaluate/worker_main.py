"""Entry point of an evaluation process: tied to the trainer's life before it imports anything slow."""

from __future__ import annotations

import contextlib
import os
import sys

from unidle.subprocesses import end_with_trainer

_NICENESS = 10  # where both want a core, training gets nine tenths of it


def main() -> None:
    """Evaluate for one trainer until it closes the pipe."""
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
            return  # the trainer ended before this process was tied to it
        sys.path[:] = job.path
        with contextlib.closing(Evaluator(job)) as evaluator:
            evaluator.run(pipe)
    except (EOFError, ConnectionError, Stopped):
        pass  # the trainer is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(error_message(error))


if __name__ == "__main__":
    main()
