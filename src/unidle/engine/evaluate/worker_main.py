"""Entry point of an evaluation process; before it imports anything slow, it is set up to exit with the trainer."""

from __future__ import annotations

import contextlib
import gc
import os
import sys

from unidle.output import guard_output
from unidle.subprocesses import end_with_trainer

_NICENESS = 10  # if training needs the same core, it gets nine tenths of it


def main() -> None:
    """Evaluate for one trainer until it closes the pipe."""
    end_with_trainer()
    guard_output()  # an environment that prints must not fail because nobody reads it
    os.nice(_NICENESS)
    gc.disable()  # garbage collections during the imports, and one of all of torch at exit, take half a second
    from multiprocessing.connection import Connection

    import cloudpickle

    from unidle.engine.evaluate.play import Stopped
    from unidle.engine.evaluate.worker import EvaluationJob, Evaluator
    from unidle.envs.pool.worker import error_message

    gc.freeze()
    gc.enable()
    pipe = Connection(int(sys.argv[1]))
    try:
        job: EvaluationJob = cloudpickle.loads(pipe.recv_bytes())
        if os.getppid() != job.trainer:
            return  # the trainer ended before `end_with_trainer`
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
