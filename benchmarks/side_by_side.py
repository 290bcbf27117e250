"""Shared by learning.py and off_policy_learning.py: runs of unidle and SB3 over seeds, each on a core of its own.

Each run is saved when it ends, and the next command continues with those that are missing. In the JSON, `tasks` has the
rows of which all seeds are done, and `unfinished` the others; an earlier row stays until it is replaced. `--judge` does
no runs: it judges the rows of `tasks` again, by their stored returns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
from machine import RESULTS, provenance, save
from run_queue import Job, Seconds, Train, run_all

SIDES = ("unidle", "sb3")
EVALUATION_EPISODES = 50
CHEAP = 50  # seeds of a task whose runs take a minute or two
RESAMPLES = 20_000
MARGIN = 0.02  # of the baseline's improvement over a random policy: a larger loss is not "no worse"
PARTS = 10  # of a training run, each with the mean return of the episodes that ended in it

Task = dict[str, Any]


# -- one run -----------------------------------------------------------------------------------------------------------


class TrainingReturns(gymnasium.Wrapper):
    """Records the return of each episode, and after how many steps of its environment the episode ended."""

    ended: list[tuple[int, float]] = []  # noqa: RUF012  # of all environments of this process, which trains once

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._steps, self._return = 0, 0.0

    def reset(self, **arguments: Any) -> Any:
        """Start an episode."""
        self._return = 0.0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Step, and note the return if the episode ends."""
        outcome = self.env.step(action)
        self._steps, self._return = self._steps + 1, self._return + float(outcome[1])
        if outcome[2] or outcome[3]:
            self.ended.append((self._steps, self._return))
        return outcome

    @classmethod
    def by_part(cls, steps: int) -> list[float | None]:
        """The mean return in each tenth of training, given the steps of one environment; None without an episode."""
        parts: list[list[float]] = [[] for _ in range(PARTS)]
        for step, total in cls.ended:
            parts[min(PARTS * (step - 1) // steps, PARTS - 1)].append(total)
        return [round(float(np.mean(part)), 2) if part else None for part in parts]


def evaluate(
    env: gymnasium.Env,
    act: Callable[[Any], Any],
    episodes: int = EVALUATION_EPISODES,
    reset: Callable[[], None] = lambda: None,
) -> float:
    """Mean return over episodes with fixed seeds, the same for every policy; `reset` is called before each."""
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1_000_000 + episode)
        reset()
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total += float(reward)
            ended = bool(terminated or truncated)
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def random_policy(env: gymnasium.Env) -> float:
    """Mean return of uniformly random actions."""
    space = env.action_space
    space.seed(0)
    return evaluate(env, lambda _: space.sample(), episodes=100)


# -- what a set of seeds shows -----------------------------------------------------------------------------------------


def iqm(values: np.ndarray) -> np.ndarray:
    """Inter-quartile mean along the last axis: the mean of the middle half, end points weighted by their share."""
    ordered = np.sort(values, -1)
    n = ordered.shape[-1]
    edges = np.arange(n + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0, None)
    return np.asarray(ordered @ weights / weights.sum())


def worst_decile(values: np.ndarray) -> float:
    """Mean of the lowest tenth; with ten values or fewer, the lowest."""
    return float(np.sort(values)[: max(1, len(values) // 10)].mean())


def compare(returns: list[float], baseline: list[float], random: float) -> dict[str, Any]:
    """Compare the returns of unidle and of the baseline in one environment, one value per seed."""
    rng = np.random.default_rng(0)
    a, b = np.array(returns), np.array(baseline)
    resampled_a = a[rng.integers(0, len(a), (RESAMPLES, len(a)))]
    resampled_b = b[rng.integers(0, len(b), (RESAMPLES, len(b)))]
    lower, upper = np.percentile(iqm(resampled_a) - iqm(resampled_b), [2.5, 97.5])
    margin = -MARGIN * (float(iqm(b)) - random)
    return {
        "unidle_iqm": float(iqm(a)),
        "sb3_iqm": float(iqm(b)),
        "random": random,
        "difference": float(iqm(a) - iqm(b)),
        "lower_95": float(lower),
        "upper_95": float(upper),
        "margin": margin,
        "no_worse": bool(lower > margin),
    }


def is_complete(row: dict[str, Any]) -> bool:
    """Whether all seeds are done on both sides."""
    return all(str(seed) in row[side] for side in SIDES for seed in range(1, row["seeds"] + 1))


def judge(row: dict[str, Any], random: float) -> None:
    """Write the verdict, means and tails into a row that is complete."""
    returns = {side: [row[side][str(seed)] for seed in range(1, row["seeds"] + 1)] for side in SIDES}
    row |= compare(returns["unidle"], returns["sb3"], random)
    for side, values in returns.items():
        row |= {f"{side}_mean": float(np.mean(values)), f"{side}_worst_decile": worst_decile(np.array(values))}


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    description: str | None,
    tasks: Mapping[str, Task],
    sides: Mapping[str, Train],
    make: Callable[[str], gymnasium.Env],
) -> None:
    """Do the runs that the JSON of the calling script lacks, and print the table; `make` creates a task's environment.

    A task has its settings and `timesteps`, and may have a number of `seeds`, fixed before its first run.
    """
    arguments = _arguments(description, tasks)
    name, here, seconds = Path(sys.argv[0]).stem, provenance("stable-baselines3"), Seconds()
    earlier = arguments.out / f"{name}.json"
    result: dict[str, Any] = {"tasks": {}, "unfinished": {}}
    if earlier.exists():
        result |= json.loads(earlier.read_text())
    if arguments.judge:
        for row in result["tasks"].values():
            judge(row, row["random"])
        save(name, result, arguments.out)
        print_table(result)
        return
    rows: dict[str, Any] = {}
    for task in dict.fromkeys([*(owner(task, "sb3") for task in arguments.tasks), *arguments.tasks]):
        known = [result[kind].get(task) for kind in ("unfinished", "tasks")]
        rows[task] = row_of(tasks[task], known, arguments.seeds, arguments.device)
        baseline = rows[owner(task, "sb3")]
        rows[task]["sb3"] = baseline["sb3"]
        for kind in ("seconds", "training"):
            rows[task][kind]["sb3"] = baseline[kind]["sb3"]
        for side in SIDES:
            for took in rows[task]["seconds"][side].values():
                seconds.add(owner(task, side), side, took)
    wanted = dict.fromkeys(
        Job(owner(task, side), side, seed)
        for task in arguments.tasks
        for seed in range(1, rows[task]["seeds"] + 1)
        for side in SIDES
    )
    waiting = [job for job in wanted if str(job.seed) not in rows[job.task][job.side]]
    n_jobs, n_ended, failed, began = len(waiting), 0, [], perf_counter()
    cores = sorted(os.sched_getaffinity(0))[: arguments.jobs]
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for job, outcome in run_all(waiting, sides, arguments.device, cores, arguments.seconds, seconds):
        n_ended, passed = n_ended + 1, perf_counter() - began
        progress = f"[{n_ended} of {n_jobs}, {passed:.0f} s, {passed / n_ended * (n_jobs - n_ended):.0f} s to go]"
        if outcome is None:
            failed.append(job)
            print(f"{progress} {job} failed", file=sys.stderr, flush=True)
            continue
        print(f"{progress} {job}: {outcome['return']:.1f} in {outcome['seconds']:.0f} s", file=sys.stderr, flush=True)
        add(rows[job.task], job, outcome, here)
        result["unfinished"][job.task] = rows[job.task]
        save(name, result, arguments.out)  # after each run: all of them take hours
    for task in filter(lambda task: is_complete(rows[task]), arguments.tasks):
        row = rows[task]
        judge(row, row["random"] if "random" in row else random_policy(make(task)))
        result["tasks"][task] = row
        result["unfinished"].pop(task, None)
    save(name, result, arguments.out)
    print_table(result)
    if waiting:
        print(f"{len(waiting)} runs were not started; the same command continues.", file=sys.stderr)
    if failed:
        sys.exit(f"{len(failed)} runs failed: {', '.join(map(str, failed))}; the same command repeats them.")


def _arguments(description: str | None, tasks: Mapping[str, Task]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", "--envs", nargs="+", default=list(tasks), choices=list(tasks), metavar="TASK")
    parser.add_argument("--seeds", type=int, default=None, help="seeds per task and side; default: the task's own")
    parser.add_argument("--jobs", type=int, default=cores, help="runs at once, each on a core; default: all cores")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that may end after these")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: all runs share the GPU")
    parser.add_argument("--judge", action="store_true", help="judge the finished rows again, without any run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error("--seeds must be at least 1.")
    if not 1 <= arguments.jobs <= cores:
        parser.error(f"each job needs a core, and there are {cores}; choose --jobs from 1 to {cores}.")
    return arguments


def owner(task: str, side: str) -> str:
    """The task that has the runs of a side: SB3 has no prioritised replay, so its runs serve both kinds."""
    return task.removesuffix(" prioritised") if side == "sb3" else task


def row_of(task: Task, known: Sequence[dict[str, Any] | None], n_seeds: int | None, device: str) -> dict[str, Any]:
    """The first known row with the same settings, or a new one."""
    settings = {name: value for name, value in task.items() if name != "seeds"}
    row: dict[str, Any] = {"settings": settings, "timesteps": task["timesteps"], "device": device}
    # A copy: the row in the file stays as it was judged until all seeds of this one are done.
    row = next(({"device": "cpu"} | deepcopy(one) for one in known if one and one.get("settings") == settings), row)
    if row["device"] != device:
        sys.exit(f"The finished runs of {settings} were on {row['device']}; give --device {row['device']}.")
    row["seeds"] = max(n_seeds or task.get("seeds", 10), row.get("seeds", 0))
    row.setdefault("machines", [row.pop("machine")] if "machine" in row else [])
    for part in (row, row.setdefault("seconds", {}), row.setdefault("training", {})):
        for side in SIDES:
            part.setdefault(side, {})
    return row


def add(row: dict[str, Any], job: Job, outcome: dict[str, Any], here: dict[str, Any]) -> None:
    """Write the outcome of a run into its row, and the machine if it is a new one."""
    row[job.side][str(job.seed)] = outcome["return"]
    for kind in ("seconds", "training"):
        row[kind][job.side][str(job.seed)] = outcome[kind]
    if here not in row["machines"]:
        row["machines"].append(here)


def print_table(result: dict[str, Any]) -> None:
    """One line per task."""
    heads = ("steps", "seeds", "unidle", "SB3", "random", "lower 95 %", "margin")
    print(f"{'task':<34}" + "".join(f"{head:>12}" for head in heads) + "  verdict")
    for task, row in result["tasks"].items():
        verdict = "no worse" if row["no_worse"] else "inconclusive"
        figures = (row["unidle_iqm"], row["sb3_iqm"], row["random"], row["lower_95"], row["margin"])
        counts = f"{row['timesteps']:>12,}{len(row['unidle']):>12}"
        print(f"{task:<34}{counts}" + "".join(f"{figure:>12.1f}" for figure in figures) + f"  {verdict}")
