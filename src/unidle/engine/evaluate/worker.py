"""An evaluation process: evaluates snapshots of the policy on the CPU during training.

The trainer writes a policy's weights to a slot in shared memory and sends the slot's index through a pipe; the reply is
the result of the episodes. Only the trainer holds the other end of the pipe: when it is closed, this process exits.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from unidle.algos.registry import new_policy
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Share, longest_episode, play
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.protocol import Fault, HostEnvs
from unidle.envs.shared_block import map_memory
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.nn.optim.flat_parameters import FlatParameters

Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]  # name, shape and dtype of the tensors in a policy's state

_ALIGN = 64


class Snapshots:
    """Shared memory for several snapshots of a policy's weights, and a heartbeat of each process."""

    def __init__(self, memory: Any, shapes: Shapes, slots: int, processes: int) -> None:
        self.slots = [self._views(memory, shapes, slot * _state_bytes(shapes)) for slot in range(slots)]
        self.beats = np.ndarray((processes,), np.int64, memory, slots * _state_bytes(shapes))

    @staticmethod
    def nbytes(shapes: Shapes, slots: int, processes: int) -> int:
        """Size of the memory in bytes."""
        return slots * _state_bytes(shapes) + 8 * processes

    @staticmethod
    def _views(memory: Any, shapes: Shapes, start: int) -> dict[str, Tensor]:
        views = {}
        for name, shape, dtype in shapes:
            count = math.prod(shape)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            views[name] = flat.to(dtype).view(shape)
            start += _rounded(count * dtype.itemsize)
        return views


def shapes_of(state: dict[str, Tensor]) -> Shapes:
    """Names, shapes and types of a policy's state."""
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]


def _state_bytes(shapes: Shapes) -> int:
    return sum(_rounded(math.prod(shape) * dtype.itemsize) for _, shape, dtype in shapes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass
class EvaluationJob:
    """What an evaluation process receives at its start."""

    trainer: int  # its process id
    path: list[str]  # its sys.path
    payload: bytes  # (EnvMaker, EnvSpec, Config, network factory), pickled: unpickled once the path is set
    memory: int  # file descriptor of the snapshots
    shapes: Shapes
    slots: int
    process: int
    processes: int
    n_envs: int  # of the whole evaluation
    env_ids: range  # env indices of this process
    episodes: int  # of the whole evaluation
    first_index: int = FIRST_EVALUATION_ENV

    @property
    def descriptors(self) -> list[int]:
        """What its process inherits."""
        return [self.memory]


class Evaluator:
    """Some environments of an evaluation, and a policy that acts in them."""

    def __init__(self, job: EvaluationJob) -> None:
        self._job = job
        maker, env_spec, config, network = cloudpickle.loads(job.payload)
        torch.set_num_threads(config.engine.threads)  # as in the trainer, because it decides how sums are split
        self._policy = new_policy(env_spec.obs_layout, env_spec.action_layout, config.recipe, network)
        self._max_steps = longest_episode(config.run, env_spec)
        FlatParameters(self._policy)  # one contiguous tensor, like the trainer's
        self._snapshots = Snapshots(map_memory(job.memory), job.shapes, job.slots, job.processes)
        envs = maker.for_n_envs(job.n_envs), env_spec, len(job.env_ids), config.run.seed
        first_index, restarts = job.first_index + job.env_ids.start, config.engine.max_env_restarts
        self._envs: HostEnvs
        if env_spec.vectorised:
            self._envs = make_vector_envs(*envs, first_index)
        else:
            self._envs = SerialEnvs(*envs, first_index, max_env_restarts=restarts)

    def run(self, pipe: Connection) -> None:
        """Evaluate the snapshot in each slot received, until the trainer closes the pipe."""
        while True:
            slot: int = cloudpickle.loads(pipe.recv_bytes())
            self._policy.load_state_dict(self._snapshots.slots[slot])
            faults: list[Fault] = []
            share = Share(self._job.env_ids.start, self._job.n_envs)
            result = play(
                self._policy,
                self._envs,
                self._job.episodes,
                stop=self._beat,
                on_fault=faults.append,
                share=share,
                max_steps=self._max_steps,
            )
            pipe.send_bytes(cloudpickle.dumps(("ok", result, faults)))

    def _beat(self) -> bool:
        """Heartbeat at every step; returns whether the trainer is gone."""
        self._snapshots.beats[self._job.process] += 1
        return os.getppid() != self._job.trainer

    def close(self) -> None:
        """Close every environment."""
        self._envs.close()


def shares(n_envs: int, processes: int) -> Iterable[range]:
    """The environments of each process, divided as evenly as possible."""
    cuts = [round(n_envs * part / processes) for part in range(processes + 1)]
    return (range(first, end) for first, end in itertools.pairwise(cuts))
