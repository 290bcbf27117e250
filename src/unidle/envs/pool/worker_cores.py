"""The cores of the workers of a group of runs.

One core is left to the trainer: if workers, which are always busy, shared it, every run would wait for the trainer. The
workers of all runs together fill the other cores, so nearly every worker has a core to itself. That matters more than
filling the gaps in which a run infers or learns with the steps of another run: a worker that takes turns with another
process finds the caches cold, and steps much more slowly.

Some cores have one worker more than others. A rollout waits for its slowest worker, so the workers take turns on these
cores: one at a time moves from a core with more workers to one with fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROTATE_SECONDS = 0.02  # between two moves: more often than a rollout ends


class WorkerCores:
    """Gives each worker of a group its place, and each place its core at a time."""

    def __init__(self, cores: Iterable[int], runs: int) -> None:
        """For up to `runs` runs at a time."""
        _, *self._cores = sorted(cores)
        self.workers = -(-len(self._cores) // runs)
        """Workers of each run."""
        self._size = runs * self.workers
        self._taken = [False] * runs

    def take(self, workers: int) -> list[int]:
        """Places for one more run, one for each worker, at most `self.workers`; none if there is no room."""
        run = next((index for index, is_taken in enumerate(self._taken) if not is_taken), None)
        if run is None:
            return []
        self._taken[run] = True
        return [run * self.workers + worker for worker in range(min(workers, self.workers))]

    def give_back(self, places: Sequence[int]) -> None:
        """The workers of a run have ended."""
        self._taken[places[0] // self.workers] = False

    def core_of(self, place: int, now: float) -> int:
        """The core of the worker at `place`; `now` is a time of `time.monotonic`."""
        moves = (int(now / ROTATE_SECONDS) + self._size - 1 - place) // self._size
        return self._cores[(place + moves * self._size) % len(self._cores)]
