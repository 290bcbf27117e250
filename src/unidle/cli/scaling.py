"""`unidle scaling`: compare critics of several widths, with the same actor, on Meta-World."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidle.cli.flags import normalise_flags, parse
from unidle.config import Engine
from unidle.config.presets import load_preset
from unidle.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from unidle.api import TrainedRun

_PRESETS = {"mt10": "mt10-paper-400", "mt50": "mt50-paper-1024"}
_LAYERS = 3


@dataclass(frozen=True)
class _ScalingFlags:
    """Train critics of several widths on Meta-World, and plot success rate and dormant neurons against width.

    Finished runs are reused, and interrupted runs are resumed.
    """

    actor: int = 400
    """Width of the actor's three layers."""
    critic: tuple[int, ...] = (200, 400, 1024, 4096)
    """Widths of the critics' three layers, such as 200,400."""
    tasks: Literal["mt10", "mt50"] = "mt10"
    """Meta-World tasks; other settings come from the preset mt10-paper-400 or mt50-paper-1024."""
    timesteps: int | None = None
    """Environment steps of each run; none: the preset's."""
    eval_episodes: int | None = None
    """Episodes per evaluation; none: the preset's."""
    seed: int = 0
    """Seed of each run."""
    save_replay_buffer: bool = True
    """Store the replay buffer in checkpoints; without it, a resumed run first refills it."""
    runs_dir: str = "runs"
    """Parent folder of the run folders and of the plot."""
    engine: Engine = field(default_factory=Engine)
    json: bool = False
    """Print the result as a JSON object."""


def scaling_command(argv: list[str]) -> dict[str, Any] | None:
    """`unidle scaling`"""
    flags = parse(_ScalingFlags, normalise_flags(argv), "scaling")
    if not flags.critic or min(flags.actor, *flags.critic) < 1:
        raise UsageError("--actor and --critic need widths of at least 1; use, for example, --critic 200,400.")

    from unidle.scaling import chart, compare

    points = compare(flags.critic, lambda width: _trained(flags, width))
    plot = Path(flags.runs_dir) / f"scaling-{flags.tasks}-actor{flags.actor}-seed{flags.seed}.svg"
    plot.write_text(chart(points, f"{flags.tasks.upper()}, actor {flags.actor} wide"), encoding="utf-8")
    if flags.json:
        return {"actor": flags.actor, "points": [dataclasses.asdict(point) for point in points], "plot": str(plot)}
    print("critic  success  dormant  run")
    for point in points:
        shares = ("–" if share is None else f"{share:.0%}" for share in (point.success, point.dormant))
        print("{:>6}  {:>7}  {:>7}  {}".format(point.critic, *shares, point.run))
    print(f"plot    {plot}")
    return None


def _trained(flags: _ScalingFlags, width: int) -> TrainedRun:
    """The run with critics of that width: reused if finished, else trained or resumed.

    Raises TrainingError if the user stops it, so that no further width is trained.
    """
    from unidle.api import load, resume, train
    from unidle.scaling import is_finished

    preset = load_preset(_PRESETS[flags.tasks])
    run_name = f"scaling-{flags.tasks}-actor{flags.actor}-critic{width}-seed{flags.seed}"
    path = Path(flags.runs_dir) / run_name
    given = {"timesteps": flags.timesteps, "eval_episodes": flags.eval_episodes}
    # The preset's values even if the run exists: a shorter earlier run must not be plotted as a finished one.
    settings: dict[str, Any] = {name: preset.values[name] if value is None else value for name, value in given.items()}
    settings |= vars(flags.engine)
    if (path / "config.yaml").exists():
        run = load(path)
        if is_finished(run, settings["timesteps"]):
            return run
        run = resume(path, **settings)
    else:
        settings |= {"net_arch": (flags.actor,) * _LAYERS, "critic_arch": (width,) * _LAYERS, "seed": flags.seed}
        settings |= {"run_name": run_name, "runs_dir": flags.runs_dir, "save_replay_buffer": flags.save_replay_buffer}
        env = f"metaworld:{flags.tasks.upper()}"
        run = train(env, preset=preset.name, allow_recipe_change=True, **settings)
    if not is_finished(run, settings["timesteps"]):
        raise TrainingError("Stopped; run the same command again to continue.")
    return run
