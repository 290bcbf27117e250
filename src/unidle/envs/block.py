"""The memory through which environments and collector talk: one array per field, a line per environment."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

from unidle.envs.request_outcomes import OUTCOMES
from unidle.envs.spec import EnvSpec

FAILED, SUCCEEDED = 1, 2  # in `episode_success`; 0 where the environment does not tell

# What every step is noted for, as one word: a collector copies a word several times as quickly as three fields.
_STEP_WORD = np.dtype([("reward", "<f4"), ("terminated", "?"), ("truncated", "?"), ("nothing", "<u2")])
ENDED = np.int64(1 << 32)  # as an int64 a word is at least this where an episode ended: `nothing` is always 0

# What a step leaves behind, beside the observation rows: plain numbers in shared memory, nothing is pickled.
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("outcome", np.int64),  # reward, terminated and truncated, which are views of it
    ("episode_return", np.float64),  # of the episode that just ended
    ("episode_length", np.int64),  # −1 where a worker's death cut the episode off: it did not end by itself
    ("episode_success", np.int8),  # whether it succeeded at any of its steps
    ("episode", np.int64),  # number of the episode now open
    ("skip", np.bool_),  # set by the trainer: this line is not stepped with its slice, and stays as it is
    # The step did not happen: the environment failed and was made again, and `obs` holds the first observation of its
    # next episode. The other fields of the line mean nothing then. Written by every step.
    ("redo", np.bool_),
    ("beats", np.int64),  # counts hand-overs, resets and replayed steps: a sign of life
)


class Block:
    """Views of one buffer: `obs` and `final_obs` [N, obs_bytes], `actions` [N, width], and the fields above [N]."""

    outcome: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    episode_success: np.ndarray
    episode: np.ndarray
    skip: np.ndarray
    redo: np.ndarray
    beats: np.ndarray

    def __init__(self, env_spec: EnvSpec, n_envs: int, buffer: Any = None) -> None:
        """Lay the views over `buffer`, or over new private memory."""
        self.memory = buffer if buffer is not None else mmap.mmap(-1, self.nbytes(env_spec, n_envs))
        self._offset = 0

        def view(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            array = np.ndarray(shape, dtype, self.memory, self._offset)
            self._offset = -(-(self._offset + array.nbytes) // 64) * 64
            return array

        self.obs = view((n_envs, env_spec.obs_layout.obs_bytes), np.uint8)
        # The last observation of an episode that was truncated in this step; left alone otherwise.
        self.final_obs = view((n_envs, env_spec.obs_layout.obs_bytes), np.uint8)
        self.actions = view((n_envs, env_spec.action_layout.width), np.float32)
        for name, dtype in _FIELDS:
            setattr(self, name, view((n_envs,), dtype))
        self.reward, self.terminated, self.truncated = parts_of(self.outcome)
        # What became of the requests of environments that make some, so far.
        self.requests = view((n_envs, len(OUTCOMES)), np.int64)

    @staticmethod
    def nbytes(env_spec: EnvSpec, n_envs: int) -> int:
        """Bytes a block of this shape takes, paddings included."""
        per_env = (
            2 * env_spec.obs_layout.obs_bytes
            + 4 * env_spec.action_layout.width
            + sum(np.dtype(d).itemsize for _, d in _FIELDS)
            + 8 * len(OUTCOMES)
        )
        return -(-(n_envs * per_env) // 64) * 64 + 64 * (len(_FIELDS) + 4)

    def request_counts(self) -> dict[str, int]:
        """What became of all requests so far, by kind; nothing where none are made."""
        counts = self.requests.sum(0).tolist()
        return {kind: count for kind, count in zip(OUTCOMES, counts) if count}


def parts_of(outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of rewards, terminated and truncated in these words."""
    parts = outcomes.view(_STEP_WORD)
    return parts["reward"], parts["terminated"], parts["truncated"]


def shared_memory(nbytes: int) -> int:
    """A descriptor of anonymous memory: no name to clean up, no share of /dev/shm, gone with its last holder."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("unidle")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def map_memory(descriptor: int) -> mmap.mmap:
    """The memory behind a descriptor."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
