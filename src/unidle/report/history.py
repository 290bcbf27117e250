"""The history of a run, read from its folder: settings, records and derived figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidle.config.files import read_yaml, run_config_file
from unidle.config.renamed import without_other_algorithms
from unidle.config.settings import round_up_timesteps
from unidle.engine.progress import evaluation_rank
from unidle.formatting import outcome, percent, short_number
from unidle.metrics.jsonl import read_records
from unidle.timeline import PHASES

Record = dict[str, Any]

SECTIONS = ("recipe", "engine", "run")
_MAIN_PHASES = ("environment", "inference", "learn", "evaluate")


@dataclass(frozen=True)
class History:
    """A run so far, as recorded in its files; unknown figures are None."""

    folder: Path
    config: dict[str, dict[str, Any]]  # section → setting → value
    iterations: list[Record]
    evaluations: list[Record]
    faults: list[Record]  # environments that failed and were restarted
    changes: list[Record] = field(default_factory=list)  # settings and kernels that changed when the run was resumed
    provenance: list[Any] = field(default_factory=list)  # what each process that trained was made with

    @property
    def name(self) -> str:
        """The run's name, or that of its folder."""
        return str(self.setting("run", "run_name") or self.folder.resolve().name)

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return max((int(r["step"]) for r in (*self.iterations, *self.evaluations)), default=0)

    @property
    def total_steps(self) -> int | None:
        """Planned steps, rounded up to whole iterations, or the steps so far if those are more."""
        total, *sizes = self.setting("run", "timesteps"), *(self.setting("recipe", n) for n in ("n_envs", "n_steps"))
        if not isinstance(total, int) or total < 1:
            return None
        is_known = all(isinstance(size, int) and size > 0 for size in sizes)
        return max(self.steps, round_up_timesteps(total, math.prod(sizes)) if is_known else total)

    @property
    def progress(self) -> str:
        """Progress as text: 97 % of 51.2k."""
        total = self.total_steps
        return f"{percent(self.steps / total)} of {short_number(total)}" if total else ""

    @property
    def wall(self) -> float:
        """Seconds of training so far, including the wait for the last evaluations."""
        records = (*self.iterations, *self.evaluations)
        return max(
            ((number(r, "wall") or 0.0) + (number(r, "eval/seconds_behind") or 0.0) for r in records), default=0.0
        )

    @property
    def steps_per_second(self) -> float | None:
        """Mean over all training time, evaluations and checkpoints included."""
        if not self.iterations:
            return None
        wall = number(self.iterations[-1], "wall")
        return int(self.iterations[-1]["step"]) / wall if wall else None

    @property
    def training_return(self) -> float | None:
        """Mean return of the latest 100 training episodes."""
        found = (number(r, "rollout/return_mean") for r in reversed(self.iterations))
        return next((value for value in found if value is not None), None)

    @property
    def final_evaluation(self) -> Record | None:
        """The latest evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best_evaluation(self) -> Record | None:
        """The evaluation whose policy was saved as the best; if none is marked, the one with the best result."""
        kept = [r for r in self.evaluations if r.get("eval/best")]
        return kept[-1] if kept else max(self.evaluations, key=evaluation_rank, default=None)

    @property
    def highest_return(self) -> float | None:
        """Highest mean return of all evaluations."""
        return max((float(r["eval/return_mean"]) for r in self.evaluations), default=None)

    @property
    def success(self) -> float | None:
        """Success rate of the latest evaluation."""
        return None if self.final_evaluation is None else number(self.final_evaluation, "eval/success")

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks in the latest evaluation."""
        names = [key for key in self.final_evaluation or () if key.startswith("eval/return/")]
        return [name.removeprefix("eval/return/") for name in names]

    @property
    def fault_counts(self) -> dict[str, int]:
        """Number of recorded faults by kind."""
        return dict(Counter(str(r.get("fault", "unknown")) for r in self.faults))

    @property
    def requeues(self) -> int:
        """How often SLURM started its jobs again."""
        restarts: dict[str, int] = {}
        for entry in self.provenance:
            slurm = entry.get("slurm") if isinstance(entry, dict) else None
            if isinstance(slurm, dict) and type(count := slurm.get("restarts")) is int:
                job = str(slurm.get("job"))
                restarts[job] = max(restarts.get(job, 0), count)
        return sum(restarts.values())

    @property
    def overlap(self) -> str | None:
        """The overlap setting; None if unknown."""
        value = self.setting("recipe", "overlap")
        return value if value in ("off", "strict") else None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far; *evaluate* includes the wait for evaluations at the end."""
        return _seconds(self._whole) if self._whole else {}

    @property
    def evaluation_wait(self) -> float:
        """Seconds that training waited for evaluations, including those at the end."""
        return self.seconds.get("evaluate", 0.0) if self.evaluations else 0.0

    @property
    def time_shares(self) -> dict[str, float]:
        """Share of each phase in the time so far, as in `seconds`; sums to 1, or is empty."""
        return time_shares(self._whole) if self._whole else {}

    @property
    def _whole(self) -> Record | None:
        """The time of the whole run, as a record: the latest one, and what training waited for evaluations since."""
        timed = [r for r in (*self.iterations, *self.evaluations) if _seconds(r)]
        latest = max(timed, key=lambda r: number(r, "wall") or 0.0, default=None)
        if latest is None:
            return None
        waited = max(0.0, self.wall - (number(latest, "wall") or 0.0))
        return {**latest, "time/evaluate": _seconds(latest).get("evaluate", 0.0) + waited, "wall": self.wall}

    @property
    def own_settings(self) -> dict[str, dict[str, Any]]:
        """The settings by section; of the recipe, those of the run's algorithm (old files list those of all)."""
        return {name: without_other_algorithms(self.config[name]) for name in SECTIONS}

    def setting(self, section: str, name: str) -> Any:
        """A value of `config.yaml`, or None."""
        return self.config[section].get(name)


def read_history(folder: Path, say: Callable[[str], None] | None = None) -> History:
    """Read the history of a run folder; UsageError if it is not one. `say` receives a message about damaged lines."""
    tree, records = read_yaml(run_config_file(folder)), read_records(folder / "metrics.jsonl", say)
    return history_of(folder, tree, records, read_records(folder / "changes.jsonl"))


def history_of(folder: Path, tree: dict[str, Any], records: list[Record], changes: Sequence[Record] = ()) -> History:
    """Build the history from the `tree` of a config.yaml and the `records` of a metrics.jsonl and a changes.jsonl."""
    sections = {name: tree.get(name) for name in SECTIONS}
    records = [r for r in records if number(r, "step") is not None]
    return History(
        folder=folder,
        config={name: part if isinstance(part, dict) else {} for name, part in sections.items()},
        iterations=[r for r in records if r.get("kind") == "iteration"],
        evaluations=[r for r in records if r.get("kind") == "evaluation" and number(r, "eval/return_mean") is not None],
        faults=[r for r in records if r.get("kind") == "fault"],
        changes=list(changes),
        provenance=entries if isinstance(entries := tree.get("provenance"), list) else [],
    )


def number(record: Record, key: str) -> float | None:
    """Return the finite number under `key`, or None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer with hundreds of digits
        return None


def evaluation_text(record: Record, *, spread: bool = True) -> str:
    """Return an evaluation as text: mean return, optionally its `spread`, and success rate."""
    std, success = number(record, "eval/return_std") if spread else None, number(record, "eval/success")
    return outcome(float(record["eval/return_mean"]), std, success)


def task_success(record: Record) -> dict[str, float]:
    """Return the success rate of each task."""
    keys = [key for key in record if key.startswith("eval/success/")]
    return {key.removeprefix("eval/success/"): value for key in keys if (value := number(record, key)) is not None}


def fault_counts(record: Record) -> dict[str, int]:
    """Return the number of faults by kind up to this iteration."""
    keys = [key for key in record if key.startswith("faults/")]
    return {key.removeprefix("faults/"): int(value) for key in keys if (value := number(record, key))}


def _seconds(record: Record) -> dict[str, float]:
    """Return the seconds of each phase up to `record`."""
    return {part: value for part in PHASES if (value := number(record, f"time/{part}")) is not None}


def time_shares(record: Record, since: Record | None = None) -> dict[str, float]:
    """Return the share of each phase in the time up to `record`, or between `since` and it.

    Time outside all phases is shown as unattributed.
    """
    before = since or {}
    earlier = _seconds(before)
    seconds = {part: max(0.0, now - earlier.get(part, 0.0)) for part, now in _seconds(record).items()}
    known = sum(seconds.values())
    wall = (number(record, "wall") or 0.0) - (number(before, "wall") or 0.0)
    if known and wall > 1.01 * known:  # phases are read slightly before the wall clock
        seconds["unattributed"] = wall - known
    total = sum(seconds.values())
    return {part: value / total for part, value in seconds.items()} if total else {}


def main_time_shares(record: Record) -> dict[str, float]:
    """Return `time_shares` of the main phases, and the rest as *other*; sums to 1, or is empty."""
    shares = time_shares(record)
    main = {part: shares[part] for part in _MAIN_PHASES if part in shares}
    return {**main, "other": max(0.0, 1.0 - sum(main.values()))} if shares else {}


def time_shares_over(iterations: list[Record], windows: int = 60) -> list[tuple[Record, dict[str, float]]]:
    """Return `time_shares` of at most `windows` segments of the run, each with its last record."""
    stride = max(1, math.ceil(len(iterations) / windows))
    ends = iterations[::-1][::stride][::-1]  # counted from the end, so that the latest record is in
    befores = [None, *ends[:-1]]
    return [(end, shares) for before, end in zip(befores, ends) if (shares := time_shares(end, before))]
