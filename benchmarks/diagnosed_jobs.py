"""Training jobs for `unidle diagnose`, each with one planted reason to be slow; some exist only on a GPU."""

from __future__ import annotations

_SMALL = "--preset classic --n-envs 4 --n-steps 64 --batch-size 64 --n-epochs 4"
_LARGE = "--preset classic --n-envs 64 --n-steps 128 --batch-size 4096 --net-arch 2048,2048"

# Job → (planted cause, as named by `unidle diagnose`; flags of the training job).
_ANYWHERE = {
    "sleeping": ("environment waits", f"--env slow_envs:Sleeping {_SMALL}"),
    "sleeping, one worker": ("environment waits", f"--env slow_envs:Sleeping --workers 1 {_SMALL}"),
    "asking a server": ("environment waits", f"--env slow_envs:Asking {_SMALL}"),
    "burning": ("environment computes", f"--env slow_envs:Burning {_SMALL}"),
    "burning, one worker": ("environment computes", f"--env slow_envs:Burning --workers 1 {_SMALL}"),
    "threads": ("too many threads", f"--env slow_envs:Threaded --workers 4 {_SMALL}"),
    "tiny minibatches": ("small batches", f"--env slow_envs:Cheap {_SMALL} --batch-size 4 --n-epochs 10"),
    "tiny, off-policy": ("small batches", "--env slow_envs:Cheap --preset dqn --n-envs 4 --batch-size 4"),
}
_WITHOUT_GPU = {
    "one environment": ("too few environments", f"--env slow_envs:Cheap {_SMALL} --n-envs 1 --n-epochs 1"),
    "healthy": (
        "no faster settings",
        "--env slow_envs:Cheap --preset classic --n-envs 8 --n-steps 256 --batch-size 512 --n-epochs 10 "
        "--net-arch 512,512",
    ),
}
_ON_GPU = {
    "forced sync": (
        "not captured",
        "--env slow_envs:Cheap --network slow_networks:HostSync --preset classic --n-envs 64 --n-steps 32 "
        "--batch-size 256 --n-epochs 4 --net-arch 1024,1024",
    ),
    "throttled copy": (
        "copies and syncs",
        "--env slow_envs:Wide --network slow_networks:Subsample --preset classic --n-envs 30 --n-steps 32 "
        "--batch-size 480 --n-epochs 1",
    ),
    "oversized buffer": (
        "buffer on the host",
        "--env slow_envs:Pictures --preset dqn --n-envs 16 --n-steps 8 --batch-size 256 --buffer-size 300000 "
        "--utd-ratio 0.25",
    ),
    "graphs off": (
        "small batches",
        "--env slow_envs:Cheap --no-graphs --preset classic --n-envs 64 --n-steps 64 --batch-size 256 --n-epochs 10",
    ),
    "TF32 off": ("TF32 off", f"--env slow_envs:Cheap --precision fp32 {_LARGE} --n-epochs 20"),
    "healthy": ("no faster settings", f"--env slow_envs:Cheap {_LARGE} --n-epochs 120"),
    # A network so large that the CPU is not an alternative.
    "one environment": (
        "too few environments",
        f"--env slow_envs:Cheap {_SMALL} --n-envs 1 --n-epochs 1 --net-arch 1024,1024",
    ),
}
ON_ONE_CORE = {"healthy"}  # jobs to run on one core if there is no GPU: with more cores, more workers would help
# Bytes of GPU memory that another program leaves free: less than the replay buffer needs.
FREE_GPU_MEMORY = {"oversized buffer": 6 * 2**30}


def diagnosed_jobs(on_gpu: bool) -> dict[str, tuple[str, str]]:
    """Return the jobs for a machine with or without a GPU; jobs that need one come first."""
    return {**_ON_GPU, **_ANYWHERE} if on_gpu else {**_ANYWHERE, **_WITHOUT_GPU}
