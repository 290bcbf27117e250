"""Facts, one per line, and the closing summary of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from unidle.config.files import display_path
from unidle.formatting import apportion, duration, faults, score, short_number
from unidle.report.gpu_use import read_gpu_use
from unidle.report.history import Record, evaluation_text, read_history


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print `facts` in two columns, without wrapping, so that paths can be copied."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        console.print(Text.assemble((name.ljust(width), "dim"), "  ", value), soft_wrap=True)


def print_summary(
    console: Console, folder: Path, *, report: Path | None = None, checkpoint: Path | None = None
) -> None:
    """Print the results of a run from its folder, and the paths of its report and checkpoint."""
    history = read_history(folder)
    training, speed = history.training_return, history.steps_per_second
    shares = "  ".join(f"{part} {share} %" for part, share in apportion(history.time_shares).items() if share)
    counts = history.fault_counts
    facts = {
        "steps": f"{history.steps:,} in {duration(history.wall)}",
        "speed": f"{short_number(speed)} steps/s on average" if speed else None,
        "training return": f"{score(training)}, last 100 episodes" if training is not None else None,
        "best evaluation": _evaluation(history.best_evaluation),
        "final evaluation": _evaluation(history.final_evaluation),
        "time": shares or None,
        "waited": f"{duration(history.evaluation_wait)} for evaluations" if history.evaluations else None,
        "GPU": read_gpu_use(folder).text,
        "overlap": history.overlap,
        "requeued": _requeues(history.requeues),
        "faults": f"{faults(counts)}; see {display_path(folder / 'metrics.jsonl')} for details" if counts else None,
        "report": display_path(report) if report else None,
        "checkpoint": display_path(checkpoint) if checkpoint else None,
    }
    console.print()
    console.print(Text(history.name, style="bold"), soft_wrap=True)
    print_facts(console, {name: value for name, value in facts.items() if value is not None})


def _requeues(count: int) -> str | None:
    return f"{count} time{'s' * (count > 1)}, by SLURM" if count else None


def _evaluation(record: Record | None) -> str | None:
    if record is None:
        return None
    return f"{evaluation_text(record)} at step {short_number(record['step'])}"
