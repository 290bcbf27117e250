"""`unidle eval`: evaluate the policy of a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from unidle.cli.flags import Result, parse
from unidle.cli.trust import is_trusted
from unidle.formatting import outcome


@dataclass(frozen=True)
class _EvalFlags:
    """Evaluate the best policy of a run in new environments."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, such as runs/my-run."""
    episodes: int = 20
    """Number of episodes."""
    seed: int | None = None
    """Seed of the episodes; none: one that training did not use."""
    stochastic: bool = False
    """Sample actions instead of taking the mode of the distribution."""
    video: bool = False
    """Record the first episode, with deterministic actions, as video.mp4 in the run folder (extra `video`)."""
    trust: bool = False
    """Trust a run that you did not create: import the code named in its config."""
    json: bool = False
    """Print the result as a JSON object."""


def eval_command(argv: list[str]) -> Result:
    """`unidle eval`"""
    flags = parse(_EvalFlags, argv, "eval")

    from unidle.api import load

    run = load(flags.run, trust=is_trusted(flags.run, ["env", "wrappers", "network"], flags.trust))
    result = run.evaluate(flags.episodes, seed=flags.seed, deterministic=not flags.stochastic)
    if result.trace is not None:
        _write_trace(flags.run, run.agent.step, result.trace)
    video = None
    if flags.video:
        from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV
        from unidle.envs.pool.slot import episode_seed
        from unidle.report.video import record_video
        from unidle.writing import remove_link

        seed = run.config.run.seed + 1 if flags.seed is None else flags.seed  # as in `evaluate`
        first = episode_seed(seed, FIRST_EVALUATION_ENV, 0)
        video = record_video(run.agent, run.maker(), remove_link(flags.run / "video.mp4"), first)
    if flags.json:
        return {
            "run": str(flags.run),
            "step": run.agent.step,
            "episodes": result.episodes,
            "mean_return": result.mean_return,
            "std_return": result.std_return,
            "mean_length": result.mean_length,
            "success": result.success,
            "returns": result.returns,
            "video": str(video) if video else None,
        }
    print(f"{result.episodes} episodes with the policy of step {run.agent.step:,}")
    print(f"mean return {outcome(result.mean_return, result.std_return, None)}, mean length {result.mean_length:.0f}")
    if result.success is not None:
        print(f"success     {result.success:.0%} of the episodes")
    if video:
        print(f"video       {video}")
    return None


def _write_trace(folder: Path, step: int, trace: dict[str, Any]) -> None:
    """Add the first episode to the report; the evaluation never fails because of it."""
    from unidle.engine.evaluate.episode_trace import write_trace
    from unidle.report.dashboard.files import is_training
    from unidle.report.page.report import write_report

    if is_training(folder.resolve()):
        return  # the training process writes the report, with its own evaluations
    try:
        write_trace(folder, step, trace)
        write_report(folder)
    except OSError as error:
        reason = f"The report in {folder} was not updated ({error.strerror}); make the folder writable."
        print(f"unidle: {reason}", file=sys.stderr)
