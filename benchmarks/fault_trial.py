"""Disturbs runs and damages their files at random; each must end as it should, and lose nothing.

    python benchmarks/fault_trial.py [--part runs] [--first 0] [--tries 24] [--seed 0] [--parallel 2]

The parts: `runs` are disturbed processes (`disturbed_runs.py`), `groups` and `sweeps` are killed and resumed
(`killed_groups.py`), `checkpoints` and `texts` are damaged files (`damaged_files.py`). A try is *held* if the run ends
as it should, nothing of it runs on, it resumes to its end, and weights and evaluations are those of the undisturbed
run, or if a damaged file is refused with one sentence or used correctly; *lost* if not; *differing* if only results
differ. Tries are numbered: a later call adds those from `--first` on to the results, and replaces those with the same
numbers. Disks are tried only where file systems can be mounted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bad_disks import enter_namespace
from machine import RESULTS, provenance, save

PARTS = ("runs", "groups", "sweeps", "checkpoints", "texts")
COUNTED = ("tries", "held", "lost", "differing", "loaded_as_something_else", "tracebacks", "hangs")
SAVE_EVERY = 10  # tries


def disturbed_runs(flags: argparse.Namespace, can_mount: bool) -> Iterator[dict[str, Any]]:
    """One record for each try."""
    from disturbed_runs import attempt, reference_results

    numbers = range(flags.first, flags.first + flags.tries)
    references = reference_results(numbers, flags.seed, can_mount=can_mount)
    with ThreadPoolExecutor(flags.parallel) as executor:
        for number, (plan, outcome) in zip(
            numbers, executor.map(lambda each: attempt(each, flags.seed, references, can_mount=can_mount), numbers)
        ):
            yield {
                "number": number,
                "what": f"{plan.signal} to {plan.target}" if plan.signal else plan.disk,
                "moment": plan.moment,
                "output": plan.output,
                "job": plan.job,
                "environment": plan.env.rpartition(":")[2],
                "not compared": not plan.is_compared,
                "too late": outcome.is_late,
                "lost": outcome.lost,
                "differing": outcome.differs,
                "tracebacks": outcome.tracebacks,
                "hangs": outcome.lost == "it did not end",
            }


def damaged_files(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each try."""
    from damaged_files import attempts

    return attempts(flags.part, range(flags.first, flags.first + flags.tries), flags.seed)


def killed(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each try."""
    from killed_groups import attempts

    return attempts(flags.part, range(flags.first, flags.first + flags.tries), flags.seed)


def tries_of(flags: argparse.Namespace, can_mount: bool) -> Iterator[dict[str, Any]]:
    """One record for each try of the chosen part."""
    if flags.part == "runs":
        return disturbed_runs(flags, can_mount)
    return killed(flags) if flags.part in ("groups", "sweeps") else damaged_files(flags)


def batch_of(flags: argparse.Namespace, tries: list[dict[str, Any]], seconds: float, can_mount: bool) -> dict[str, Any]:
    """The results of one call."""
    failed = [each for each in tries if any(each.get(name) for name in ("lost", "differing", "tracebacks", "hangs"))]
    failed += [each for each in tries if each.get("loaded as something else")]
    counts = {
        "part": flags.part,
        "first": flags.first,
        "tries": len(tries),
        "held": len(tries) - len({each["number"] for each in failed}),
        "lost": sum(bool(each["lost"]) for each in tries),
        "differing": sum(bool(each.get("differing")) for each in tries),
        "loaded_as_something_else": sum(bool(each.get("loaded as something else")) for each in tries),
        "tracebacks": sum(bool(each["tracebacks"]) for each in tries),
        "hangs": sum(bool(each["hangs"]) for each in tries),
    }
    kinds = ("what", "moment", "output", "job", "environment", "damage", "outcome")
    for name in ("not compared", "too late", "through the command line"):
        if any(name in each for each in tries):
            counts[name] = sum(bool(each.get(name)) for each in tries)
    return {
        **counts,
        "failures": failed,
        **{name: dict(Counter(each[name] for each in tries).most_common()) for name in kinds if name in tries[0]},
        "disks": "tried" if can_mount else "skipped: this machine lets nobody mount one",
        "seed": flags.seed,
        "seconds": round(seconds),
        **provenance(),
    }


def batches_in(folder: Path) -> list[dict[str, Any]]:
    """The results so far."""
    path = folder / "fault_trial.json"
    return list(json.loads(path.read_text()).get("batches", [])) if path.exists() else []


def merged(batches: list[dict[str, Any]], new: dict[str, Any]) -> dict[str, Any]:
    """All results: those of `batches` that `new` does not repeat, and `new`; with totals over all of them."""
    begin, end = new["first"], new["first"] + new["tries"]
    kept = [
        each
        for each in batches
        if (each["part"], each["seed"]) != (new["part"], new["seed"])
        or each["first"] + each["tries"] <= begin
        or each["first"] >= end
    ]
    batches = sorted([*kept, new], key=lambda each: (PARTS.index(each["part"]), each["seed"], each["first"]))
    totals = {name: sum(each[name] for each in batches) for name in COUNTED}
    by_part = {part: sum(each["tries"] for each in batches if each["part"] == part) for part in PARTS}
    return {**totals, "tries_by_part": by_part, "batches": batches}


def main() -> None:
    """Run a part of the trial and add it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="runs")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tries", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of fault_trial.json")
    flags = parser.parse_args()
    can_mount = flags.part == "runs" and enter_namespace()
    if flags.part == "runs" and not can_mount:
        print("Disks are skipped: this machine lets nobody mount one.")
    began, tries = time.monotonic(), []
    for each in tries_of(flags, can_mount):
        tries.append(each)
        if len(tries) % SAVE_EVERY == 0 or len(tries) == flags.tries:
            batch = batch_of(flags, tries, time.monotonic() - began, can_mount)
            path = save("fault_trial", merged(batches_in(flags.results), batch), flags.results)
    print(", ".join(f"{name.replace('_', ' ')} {batch[name]}" for name in COUNTED))
    print(path)
    sys.exit(bool(batch["failures"]))


if __name__ == "__main__":
    main()
