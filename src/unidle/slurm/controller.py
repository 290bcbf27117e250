"""Query and requeue a job with scontrol."""

from __future__ import annotations

import re
import subprocess

from unidle.slurm.attempts import SlurmJob

_TIMEOUT_S = 20.0  # shorter than the 30 seconds that SLURM usually leaves to a job after SIGTERM


class RequeueError(Exception):
    """SLURM does not start the job again: a reason in words."""


def requeue(job: SlurmJob) -> bool:
    """Have SLURM start the job again when it is its turn; False if its user has cancelled it.

    RequeueError if SLURM refuses.
    """
    # While it ends, a job is COMPLETING, whatever it ends as: its other fields tell why.
    shown = _scontrol("show", "job", "-o", job.id).stdout
    fields = dict(re.findall(r"(?<!\S)(JobState|Reason|Restarts|PreemptTime)=(\S+)", shown))
    if int(fields.get("Restarts", 0)) > job.restarts:
        return True  # preempted, or requeued by an administrator: SLURM has done it already
    is_preempted = fields.get("PreemptTime", "None") != "None"
    if fields.get("JobState", "RUNNING") != "RUNNING" and not is_preempted and fields.get("Reason") != "TimeLimit":
        return False
    done = _scontrol("requeue", job.id)
    if done.returncode:
        raise RequeueError(" ".join(done.stderr.split()) or f"scontrol ended with code {done.returncode}")
    return True


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "no answer"
        raise RequeueError(f"scontrol: {reason}") from None
