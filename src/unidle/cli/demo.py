"""`unidle demo`: train, evaluate and report something small."""

from __future__ import annotations

import shlex
import webbrowser
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from unidle.cli.eval import eval_command
from unidle.cli.flags import Result, parse
from unidle.cli.results import WithCode
from unidle.cli.train import train_command

_TRAIN = (
    "CartPole-v1 --preset classic --timesteps 150000 --seed 1 --eval-every 10000 --eval-episodes 20 --target-return 490"
)


@dataclass(frozen=True)
class _DemoFlags:
    """Train CartPole-v1 to a mean return of 490, evaluate the policy and write its report: seconds on two cores.

    Prints the commands that it runs, so that you can repeat them with other settings.
    """

    runs_dir: Path = Path("runs")
    """Folder for the run, which gets a name with the time."""
    open: bool = False
    """Open the report in a browser."""
    json: bool = False
    """Print the result as a JSON object."""


def demo_command(argv: list[str]) -> Result | WithCode:
    """`unidle demo`"""
    flags = parse(_DemoFlags, argv, "demo")
    name = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    run = flags.runs_dir / name
    where = [] if flags.runs_dir == Path("runs") else ["--runs-dir", str(flags.runs_dir)]
    json = ["--json"] if flags.json else []
    train = [*_TRAIN.split(), "--run-name", name, *where]
    evaluate = [str(run), "--episodes", "20"]

    print(f"$ unidle train {shlex.join(train)}", flush=True)
    trained = train_command([*train, *json])
    if isinstance(trained, WithCode):
        return trained  # stopped by a signal
    print(f"\n$ unidle eval {shlex.join(evaluate)}", flush=True)
    evaluated = eval_command([*evaluate, *json])
    report = (run / "report.html").absolute()
    print(f"\nThe report: {report}")
    if flags.open:
        webbrowser.open(report.as_uri())
    return {"train": trained, "eval": evaluated, "report": str(report)} if flags.json else None
