"""Resumes a run in child processes that are killed at random times: `kill_driver.py FOLDER KILLS SEED`.

Forks after importing everything, so that a new child does not have to start an interpreter. Prints a JSON object: the
number of killed children, and the number of intact checkpoints found after them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder


def main() -> None:
    path, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    kill_times = random.Random(seed)
    killed = intact = 0
    while True:
        child = os.fork()
        if child == 0:
            unidle.resume(path, quiet=True)
            os._exit(0)
        if killed < kills:
            time.sleep(kill_times.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        for checkpoint in RunFolder.open(path).saved():
            load_checkpoint(checkpoint)  # raises if it is incomplete
            intact += 1
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "a resumed run failed"
            break
    print(json.dumps({"killed": killed, "intact": intact}))


main()
