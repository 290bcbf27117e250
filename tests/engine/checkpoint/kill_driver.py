"""Trains in children that are SIGKILLed at random moments until the run is done: `kill_driver.py FOLDER KILLS SEED`.

It imports everything once and forks, so that a kill costs milliseconds and not the start of an interpreter.
Prints one JSON object: how many children were killed, and how many checkpoints were found whole after each.
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
from unidle.engine.checkpoint.run_folder import RunFolder, load_checkpoint


def main() -> None:
    path, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    moments = random.Random(seed)
    killed = whole = 0
    while True:
        child = os.fork()
        if child == 0:
            unidle.resume(path, quiet=True)
            os._exit(0)
        if killed < kills:
            time.sleep(moments.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        for checkpoint in RunFolder.open(path).saved():
            load_checkpoint(checkpoint)  # raises if it is not whole
            whole += 1
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "a resumed run failed"
            break
    print(json.dumps({"killed": killed, "whole": whole}))


main()
