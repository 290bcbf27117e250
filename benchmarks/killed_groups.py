"""Kills groups and sweeps at random moments, resumes them, and compares them with what was left alone.

Each try kills one trainer with SIGKILL: when its folder appears, during training, during a checkpoint, or near the end;
half of the groups are killed once more after they were resumed. Every run of a group must end with the weights, best
policy and evaluations of an undisturbed group, bit for bit. A sweep must keep each trial that its journal showed as
finished, finish all others, and one of those that were interrupted must have the weights of a run that was not.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from disturbed_runs import PROGRAM, TIMEOUT_S, equals, last_step, leftovers, results, start, wait_until

SEEDS = (3, 4, 5)
_PPO = "--env CartPole-v1 --preset classic --n-envs 4 --n-steps 32 --batch-size 32 --n-epochs 2 --timesteps 3072"
_SAC = "--env Pendulum-v1 --algo sac --n-envs 2 --batch-size 16 --learning-starts 64 --buffer-size 2000 --timesteps 768"
_EVERY = "--eval-every 256 --eval-episodes 2 --eval-workers 0 --checkpoint-every 128 --net-arch 16 --device cpu"
JOBS = {
    "in-process": f"{_PPO} --no-subproc",
    "workers": f"{_PPO} --subproc --workers 2",
    "overlap": f"{_PPO} --subproc --workers 2 --overlap strict",
    "sac": f"{_SAC} --no-subproc",
}
SAME_RESULTS = {"workers": "in-process"}  # job → another one that learns the same
MOMENTS = ("start", "training", "training", "checkpoint", "end")
TRIALS = 8
SWEEP = (
    "--env CartPole-v1 --preset classic --n-envs 4 --n-steps 32 --batch-size 32 --timesteps 2048 --no-subproc "
    f"{_EVERY} --trials {TRIALS} --at-once 3 --space space.yaml --run-name a"
).split()
SPACE = "learning_rate: {low: 1e-4, high: 1e-2, log: true}\nn_epochs: [1, 2, 4]\n"
_TRACEBACK = "Traceback (most recent"


def attempts(part: str, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    """One record for each try of the part `groups` or `sweeps`."""
    for number in numbers:
        rng = random.Random(f"{part} {seed} {number}")
        with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
            trial = Killed(Path(name))
            record: dict[str, Any] = {"number": number, "what": "KILL to trainer", "lost": "", "differing": ""}
            try:
                record |= (kill_group if part == "groups" else kill_sweep)(trial, rng)
            except subprocess.TimeoutExpired:
                record["lost"] = "it did not end"
            except WrongResultError as error:
                record["lost"] = str(error)
            text = trial.log.read_text(errors="replace") if trial.log.exists() else ""
            record |= {
                "kills": trial.kills,
                "too late": trial.kills == 0,
                "tracebacks": text.count(_TRACEBACK),
                "hangs": record["lost"] == "it did not end",
            }
            if record["lost"] or record["differing"] or record["tracebacks"]:
                print(f"{record}\n{text[-3000:]}", flush=True)
        yield record


class WrongResultError(Exception):
    """What a try has lost."""


@dataclass
class Killed:
    """The processes of one try."""

    folder: Path
    kills: int = 0

    @property
    def log(self) -> Path:
        """What they print."""
        return self.folder / "log"

    def kill(self, command: list[str], condition: Callable[[], Any], delay: float) -> bool:
        """Start a command and kill it so many seconds after a condition holds; whether it had not ended before."""
        process, _ = start(self.folder, command)
        try:
            wait_until(condition, process)
            time.sleep(delay)
            is_early = process.poll() is None
            if is_early:
                os.kill(process.pid, signal.SIGKILL)
                self.kills += 1
            code = process.wait(TIMEOUT_S)
            if code != (-signal.SIGKILL if is_early else 0):
                raise WrongResultError(f"exit code {code}")
            if left := leftovers(process.pid):
                raise WrongResultError(left)
        finally:
            process.kill()
            process.wait()
        return is_early

    def run(self, command: list[str]) -> None:
        """Run a command to its end."""
        process, _ = start(self.folder, command)
        try:
            if (code := process.wait(TIMEOUT_S)) != 0:
                raise WrongResultError(f"exit code {code} of unidle {' '.join(command[1:])}")
        finally:
            process.kill()
            process.wait()


# -- groups ------------------------------------------------------------------------------------------------------------


def train(job: str) -> list[str]:
    """The command of a group called `a`."""
    seeds = ",".join(map(str, SEEDS))
    return [PROGRAM, "train", *JOBS[job].split(), *_EVERY.split(), "--seeds", seeds, "--run-name", "a"]


def runs_of_group(folder: Path) -> dict[int, dict[str, Any]]:
    """Seed → the results of that run."""
    return {seed: results(folder, f"runs/a/seed-{seed}") for seed in SEEDS}


@cache
def undisturbed(job: str) -> dict[int, dict[str, Any]]:
    """The results of a group that was left alone."""
    if job in SAME_RESULTS:
        return undisturbed(SAME_RESULTS[job])
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
        trial = Killed(Path(name))
        trial.run(train(job))
        return runs_of_group(trial.folder)


def kill_group(trial: Killed, rng: random.Random) -> dict[str, Any]:
    """Kill one group once or twice, resume it and compare all its runs."""
    job, moment, twice = rng.choice(list(JOBS)), rng.choice(MOMENTS), rng.random() < 0.5
    longest = int(re.findall(r"--timesteps (\d+)", JOBS[job])[0]) * len(SEEDS)
    steps = rng.uniform(0.02, 0.8) * longest
    if moment == "end":
        steps = rng.choice([0.9, 1.0]) * longest
    delay = rng.uniform(0, 1.0 if moment == "start" else 0.05)
    again, again_after = rng.uniform(steps, longest), rng.uniform(0, 0.05)
    folder = trial.folder / "runs/a"

    def steps_done() -> int:
        return sum(last_step(trial.folder, f"runs/a/seed-{seed}") for seed in SEEDS)

    def has_come() -> bool:
        if moment == "start":
            return (folder / "group.yaml").exists()
        is_due = steps_done() >= steps
        return is_due and (moment != "checkpoint" or any(folder.glob("seed-*/checkpoints/*.tmp")))

    def resume() -> list[str]:
        has_run = any(folder.glob("seed-*/config.yaml"))
        return [PROGRAM, "train", "--resume", "runs/a"] if has_run else [*train(job), "--resume", "auto"]

    is_early = trial.kill(train(job), has_come, delay)
    if is_early and twice:
        trial.kill(resume(), lambda: steps_done() >= again, again_after)
    if is_early:
        trial.run(resume())
    found, expected = runs_of_group(trial.folder), undisturbed(job)
    differing = [
        f"{name} of seed {seed}"
        for seed, run in found.items()
        for name in run
        if not equals(run[name], expected[seed][name])
    ]
    return {"moment": moment, "job": job, "differing": ", ".join(differing)}


# -- sweeps ------------------------------------------------------------------------------------------------------------


def trials_in(journal: Path) -> list[Any]:
    """The trials of a sweep, read as optuna-dashboard reads them."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(journal)))
    return [trial for study in storage.get_all_studies() for trial in storage.get_all_trials(study._study_id)]


def kill_sweep(trial: Killed, rng: random.Random) -> dict[str, Any]:
    """Kill one sweep, resume it, and compare its trials with those that its journal showed before."""
    (trial.folder / "space.yaml").write_text(SPACE)
    sweep = trial.folder / "runs/a"
    journal, ended, delay = sweep / "journal.log", rng.randrange(TRIALS), rng.uniform(0, 1.0)

    def has_come() -> bool:
        return journal.exists() and len(list(sweep.glob("trial-*/trial.yaml"))) >= ended

    is_early = trial.kill([PROGRAM, "sweep", *SWEEP], has_come, delay)
    before = trials_in(journal)
    if is_early:
        trial.run([PROGRAM, "sweep", "--resume", "runs/a"])
    after = trials_in(journal)
    if [each.number for each in after] != [*range(TRIALS)] or not all(each.state.is_finished() for each in after):
        raise WrongResultError(f"the trials are {[(each.number, each.state.name) for each in after]}")
    for each in before:
        kept = after[each.number]
        if each.params != kept.params:
            raise WrongResultError(f"trial {each.number} has other settings")
        if each.state.is_finished() and (each.state, each.values, each.user_attrs, each.intermediate_values) != (
            kept.state,
            kept.values,
            kept.user_attrs,
            kept.intermediate_values,
        ):
            raise WrongResultError(f"the finished trial {each.number} has changed")
    missing = [each.number for each in after if not (sweep / f"trial-{each.number}/trial.yaml").exists()]
    if missing or not (sweep / "best.yaml").exists() or any(each.state.name == "FAIL" for each in after):
        raise WrongResultError(f"trials without a result: {missing}, or no best.yaml, or a failed trial")
    interrupted = [each.number for each in before if not each.state.is_finished()]
    completed = [number for number in interrupted if after[number].state.name == "COMPLETE"]
    differing = ""
    if completed:
        number = completed[0]
        config = f"runs/a/trial-{number}/config.yaml"
        trial.run([PROGRAM, "train", "--config", config, "--runs-dir", "runs", "--run-name", "alone"])
        ours, alone = (results(trial.folder, run) for run in (f"runs/a/trial-{number}", "runs/alone"))
        differing = ", ".join(name for name in ours if not equals(ours[name], alone[name]))
    finished = sum(each.state.is_finished() for each in before)
    return {"moment": f"{finished} of {TRIALS} trials had ended", "differing": differing}
