"""Vector environments in processes of their own, so that they step while the learner works.

A process holds one vector environment, whose environments are one slice. To the collector it is a worker of the process
pool like any other: which weights act in which rollout, what happens if the process dies, and how an exception reaches
the user is all as written there. Two differences: the running means of wrappers are read from the process and given to
the one that replaces it, and the processes are not pinned to cores, because a vector environment may have threads or
processes itself.
"""

from __future__ import annotations

from unidle.envs.make import EnvMaker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.shared import SharedPools
from unidle.envs.spec import EnvSpec
from unidle.envs.vector.vector_wrappers import Statistics


class VectorPool(ProcessPool):
    """`workers` vector environments of a native library, or the one that the factory returns."""

    def __init__(
        self,
        maker: EnvMaker,
        env_spec: EnvSpec,
        n_envs: int,
        seed: int,
        workers: int,
        first_index: int = 0,
        *,
        env_timeout: float | None = None,
        max_env_restarts: int = 10,
        shared: SharedPools | None = None,
    ) -> None:
        """Arguments as for `ProcessPool`."""
        self._has_wrappers = maker.native is None
        self._statistics: Statistics = {}
        self._is_frozen = False
        super().__init__(
            maker,
            env_spec,
            n_envs,
            seed,
            workers if maker.native else 1,
            first_index,
            env_timeout=env_timeout,
            max_env_restarts=max_env_restarts,
            shared=shared,
        )

    def statistics(self) -> Statistics:
        """The running means in wrappers; call it only while no slice is in flight."""
        if self._has_wrappers:
            self._make_envs()
            (answer,) = self._call_all("statistics", [()], self._timeout)
            if isinstance(answer, dict):  # else the process died, and its successor continues from the latest ones
                self._statistics = answer
        return self._statistics

    def load_statistics(self, state: Statistics, *, freeze: bool = False) -> None:
        """Continue from `statistics`."""
        self._make_envs()
        self._statistics, self._is_frozen = state, freeze
        self._repeat_all("load_statistics", [(state, freeze)] * self.workers)

    def _prepare(self, number: int, timeout: float) -> None:
        if self._statistics:
            self._send_command(number, "load_statistics", (self._statistics, self._is_frozen))
            self._processes[number].receive(timeout)
