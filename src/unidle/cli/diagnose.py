"""`unidle diagnose`: explain what limits the speed of a training job, and what would make it faster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from unidle.cli.job import JobFlags, job_of
from unidle.errors import TrainingError, UsageError, explain_out_of_memory


@dataclass(frozen=True)
class _DiagnoseFlags(JobFlags):
    """Explain what limits the speed of a training job and what would make it faster.

    Takes all settings of `unidle train`. Measures environments, inference, learning and copies separately, then trains
    for a few seconds without saving anything. Prints a verdict, a table of where the time goes (it sums to 100 %),
    upper bounds on the speed, and changes ranked by predicted speed-up: first those that do not affect learning, then
    recipe changes. It may also find that no setting would make the job faster, or that the CPU would. Do not run
    anything else on the machine meanwhile.
    """

    seconds: float = 20.0
    """Seconds of training; the measurements before it take about half as long, plus the start-up of environments."""
    json: bool = False
    """Print the result as a JSON object."""


@explain_out_of_memory()
def diagnose_command(argv: list[str]) -> dict[str, Any] | None:
    """`unidle diagnose`"""
    job = job_of(_DiagnoseFlags, argv, "diagnose")
    seconds = job.flags.seconds
    if not 1 <= seconds <= 3600:
        raise UsageError(f"--seconds {seconds:g} is not between 1 and 3600; 20 is enough for most jobs.")

    from unidle.report.terminal.diagnose import lines, result
    from unidle.report.terminal.messages import Messages
    from unidle.tuning.diagnose import diagnose

    messages = Messages(lambda text, style: print(text, file=sys.stderr, flush=True))
    for note in job.notes:
        messages.show(note)
    try:
        diagnosis = diagnose(job.config, seconds, messages.show)
    except KeyboardInterrupt:
        raise TrainingError("Stopped before the diagnosis was complete; nothing was saved.") from None
    finally:
        messages.close()
    if job.flags.json:
        return result(diagnosis)
    print(*lines(diagnosis), sep="\n")
    return None
