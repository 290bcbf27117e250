"""Shared by learning.py and off_policy_learning.py: training runs in processes, each on a core of its own.

A run starts only if it is expected to end in time, and is never cut short. One that fails costs no other run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import perf_counter
from typing import Any

Result = tuple[float, list[float | None]]  # mean return of the final policy, and those of training by part
Train = Callable[[str, int, str], Result]  # of a task, a seed and a device


@dataclass(frozen=True)
class Job:
    """A run to do."""

    task: str
    side: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.side} seed {self.seed}"


@dataclass
class Seconds:
    """How long runs take; a run is expected to take as long as the longest one of its task and side so far."""

    longest: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, task: str, side: str, seconds: float) -> None:
        """A finished run."""
        self.longest[task, side] = max(seconds, self.longest.get((task, side), 0.0))

    def expected(self, job: Job) -> float | None:
        """That of the other side if none of its own has ended; None if neither has."""
        own = self.longest.get((job.task, job.side))
        return own or max((seconds for (task, _), seconds in self.longest.items() if task == job.task), default=None)


def run_all(
    waiting: list[Job], sides: Mapping[str, Train], device: str, cores: list[int], limit: float, seconds: Seconds
) -> Iterator[tuple[Job, dict[str, Any] | None]]:
    """Yield each job and its outcome when it ends, None if it failed; at most one at a time on a core.

    Starts jobs in order, but none that is expected to end after `limit` seconds, or, if nothing is known, none in the
    second half of that time.
    """
    began, context = perf_counter(), get_context("spawn")
    running: dict[Connection, tuple[Job, int, Any]] = {}
    free = list(cores)
    while True:
        while free and (job := _first_in_time(waiting, limit - (perf_counter() - began), limit, seconds)):
            waiting.remove(job)
            receiver, sender = context.Pipe(duplex=False)
            core = free.pop(0)
            process = context.Process(target=_run, args=(sides[job.side], job, device, core, sender))
            process.start()
            sender.close()  # the other end is the process's alone, so that its death closes the pipe
            running[receiver] = (job, core, process)
        if not running:
            return
        ready = wait(list(running))
        for receiver in [one for one in running if one in ready]:
            job, core, process = running.pop(receiver)
            try:
                outcome = receiver.recv()
                seconds.add(job.task, job.side, outcome["seconds"])
            except EOFError:
                outcome = None
            process.join()
            free.append(core)
            yield job, outcome


def _first_in_time(waiting: list[Job], left: float, limit: float, seconds: Seconds) -> Job | None:
    for job in waiting:
        if left == float("inf") or (seconds.expected(job) or limit / 2) <= left:
            return job
    return None


def _run(train: Train, job: Job, device: str, core: int, sender: Connection) -> None:
    os.sched_setaffinity(0, {core})
    began = perf_counter()
    score, training = train(job.task, job.seed, device)
    sender.send({"return": score, "training": training, "seconds": round(perf_counter() - began, 1)})
