"""What the flags of a dead worker's slices say about their steps (see process_pool.py, 2)."""

from __future__ import annotations

import numpy as np

from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE, DONE_WITH_FAULTS, FAILED, IDLE, STEP, WorkerJob
from unidle.envs.shared_block import SharedBlock

_MAX_LISTED = 8  # environments in the message


def pending_steps(job: WorkerJob, block: SharedBlock, flags: np.ndarray) -> str:
    """Describe the environments with a step that the worker had not finished."""
    env_ids = [
        env_id
        for number in job.slices
        if flags[number] == STEP
        for env_id in range(*job.bounds[number])
        if not block.skip[env_id]
    ]
    if not env_ids:
        return " No step was pending."
    named = []
    for env_id in env_ids[:_MAX_LISTED]:
        env, episode = job.first_index + env_id, int(block.episode[env_id])
        named.append(f"{env} (episode {episode}, seed {episode_seed(job.seed, env, episode)})")
    more = f" and {len(env_ids) - _MAX_LISTED} more" if len(env_ids) > _MAX_LISTED else ""
    return f" Steps were pending in environments {', '.join(named)}{more}."


def release_slices(job: WorkerJob, block: SharedBlock, flags: np.ndarray) -> list[int]:
    """Mark the slices as done and record how the episode of each environment ended.

    Returns the environments that were not stepping: their episodes are lost between two steps.
    """
    lost: list[int] = []
    for number in job.slices:
        first, end = job.bounds[number]
        env_ids = slice(first, end)
        waiting = block.skip[env_ids] if flags[number] != IDLE else np.ones(end - first, np.bool_)
        lost += (first + np.flatnonzero(waiting)).tolist()
        if flags[number] in (STEP, FAILED):
            block.retry[env_ids] |= ~waiting
        elif flags[number] in (DONE, DONE_WITH_FAULTS):
            cut = ~(waiting | block.retry[env_ids] | block.terminated[env_ids] | block.truncated[env_ids])
            block.final_obs[env_ids][cut] = block.obs[env_ids][cut]
            block.truncated[env_ids] |= cut
            block.episode_length[env_ids][cut] = -1
        if flags[number] != IDLE:
            flags[number] = DONE
    return lost
