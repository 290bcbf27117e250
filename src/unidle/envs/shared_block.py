"""The block of memory through which environments and collector exchange observations, actions and step results.

One array per field, one entry per environment. Worker processes map the same block, so nothing is pickled per step.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from unidle.envs.request_outcomes import OUTCOMES
from unidle.envs.spec import EnvSpec

_NAMES_BYTES = 1024  # per environment
FAILED, SUCCEEDED = 1, 2  # values of `episode_success`; 0 if the environment does not report success

# Reward, terminated and truncated packed into 8 bytes: one copy in the collector is faster than three.
_STEP_WORD = np.dtype([("reward", "<f4"), ("terminated", "?"), ("truncated", "?"), ("unused", "<u2")])
EPISODE_ENDED = np.int64(1 << 32)  # a step word is at least this, as an int64, if its episode ended

_FIELDS: tuple[tuple[str, Any], ...] = (
    ("step_words", np.int64),  # reward, terminated and truncated, which are views of it
    ("episode_return", np.float64),  # of the episode that just ended
    ("episode_length", np.int64),  # of the episode that just ended; −1 if it was truncated because its worker died
    ("episode_success", np.int8),  # of the episode that just ended: success at any of its steps
    ("episode", np.int64),  # number of the current episode
    ("skip", np.bool_),  # set by the trainer: do not step this environment with its slice
    # The step failed and the environment was restarted: `obs` is the first observation of its next episode, all other
    # fields are undefined, and the trainer repeats the step. Written by every step.
    ("retry", np.bool_),
    ("oldest_episode", np.int64),  # written by the trainer at any time: it resumes no earlier episode
    ("heartbeats", np.int64),  # counts finished slices, resets and replayed steps
)


class SharedBlock:
    """Views of one buffer: `obs` and `final_obs` [N, obs_bytes], `actions` [N, width], and the fields above [N]."""

    step_words: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    episode_success: np.ndarray
    episode: np.ndarray
    skip: np.ndarray
    retry: np.ndarray
    oldest_episode: np.ndarray
    heartbeats: np.ndarray

    def __init__(self, env_spec: EnvSpec, n_envs: int, buffer: Any = None) -> None:
        """Create the views on `buffer`, or on new private memory."""
        self.memory = buffer if buffer is not None else mmap.mmap(-1, self.nbytes(env_spec, n_envs))
        self._offset = 0

        def view(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            array = np.ndarray(shape, dtype, self.memory, self._offset)
            self._offset = -(-(self._offset + array.nbytes) // 64) * 64
            return array

        self.obs = view((n_envs, env_spec.obs_layout.obs_bytes), np.uint8)
        # Written only by a step that truncates its episode.
        self.final_obs = view((n_envs, env_spec.obs_layout.obs_bytes), np.uint8)
        self.actions = view((n_envs, env_spec.action_layout.width), np.float32)
        for name, dtype in _FIELDS:
            setattr(self, name, view((n_envs,), dtype))
        self.reward, self.terminated, self.truncated = unpack_step_words(self.step_words)
        # `env_spec.log_info` of the episode that just ended; NaN where info has no number.
        self.episode_info = view((n_envs, len(env_spec.log_info)), np.float64)
        # Names of the numbers in info at the end of an environment's first episode, comma-separated; then zeros.
        self.info_names = view((n_envs, _NAMES_BYTES if env_spec.log_info else 0), np.uint8)
        self.requests = view((n_envs, len(OUTCOMES)), np.int64)  # HTTP requests so far, by outcome

    @staticmethod
    def nbytes(env_spec: EnvSpec, n_envs: int) -> int:
        """Bytes of a block of this shape, padding included."""
        per_env = (
            2 * env_spec.obs_layout.obs_bytes
            + 4 * env_spec.action_layout.width
            + sum(np.dtype(d).itemsize for _, d in _FIELDS)
            + 8 * (len(env_spec.log_info) + len(OUTCOMES))
            + (_NAMES_BYTES if env_spec.log_info else 0)
        )
        return -(-(n_envs * per_env) // 64) * 64 + 64 * (len(_FIELDS) + 6)

    def write_info_names(self, env_id: int, names: Sequence[str]) -> None:
        """Store the names of an environment's numbers in info, as many as there is room for."""
        text = ",".join(names).encode()
        while len(text) > _NAMES_BYTES:
            text = text.rpartition(b",")[0]
        self.info_names[env_id, : len(text)] = np.frombuffer(text, np.uint8)

    def names_in_info(self) -> list[str]:
        """Names of numbers in info at the end of first episodes, of all environments."""
        texts = (bytes(row).rstrip(b"\0").decode() for row in self.info_names)
        return sorted({name for text in texts if text for name in text.split(",")})

    def request_counts(self) -> dict[str, int]:
        """All HTTP requests so far, by outcome; empty if the environments make none."""
        if not np.count_nonzero(self.requests):
            return {}
        counts = self.requests.sum(0).tolist()
        return {kind: count for kind, count in zip(OUTCOMES, counts) if count}


def unpack_step_words(step_words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of reward, terminated and truncated."""
    parts = step_words.view(_STEP_WORD)
    return parts["reward"], parts["terminated"], parts["truncated"]


def shared_memory(nbytes: int) -> int:
    """A file descriptor of anonymous memory: it has no name to clean up, and is freed with its last holder."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("unidle")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def map_memory(descriptor: int) -> mmap.mmap:
    """Map the memory behind a descriptor."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
