"""Disturbs runs at random, resumes each, and compares it bit for bit with a run that was left alone.

    python benchmarks/fault_trial.py [--tries 24] [--seed 0] [--parallel 2]

Signals (TERM, INT, HUP, USR1, KILL, STOP and CONT) go to the trainer, its process group, a worker or an evaluator: at
start-up, during training, during a checkpoint and at the end. Output goes to a file, to `tee` that is killed, to
`head`, to a closed descriptor or to a full disk. A try is *held* if the run ends as it should, nothing of it runs on,
it resumes to its end, and weights and evaluations are those of the undisturbed run; *differing* if only weights or
evaluations differ, else *lost*. A worker that was killed restarts its episodes, so these runs are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import provenance, save

PROGRAM = str(Path(sys.executable).with_name("unidle"))
TIMESTEPS = 8192
COMMON = (
    f"--env CartPole-v1 --preset classic --n-envs 4 --n-steps 32 --batch-size 32 --n-epochs 2 --net-arch 16 "
    f"--timesteps {TIMESTEPS} --eval-every 1024 --eval-episodes 4 --checkpoint-every 512"
).split()
JOBS = {
    "in-process": ["--no-subproc"],
    "workers": ["--subproc", "--workers", "2"],
    "evaluators": ["--subproc", "--workers", "2", "--eval-workers", "2"],
    "overlap": ["--subproc", "--workers", "2", "--overlap", "strict"],
}
GRACEFUL = ("INT", "TERM", "HUP", "USR1")
SIGNALS = {
    "trainer": (*GRACEFUL, "KILL", "STOP"),
    "group": GRACEFUL,
    "worker": (*GRACEFUL, "KILL", "STOP"),
    "evaluator": (*GRACEFUL, "KILL", "STOP"),
}
MODULES = {"worker": "unidle.envs.pool.worker", "evaluator": "unidle.engine.evaluate.worker_main"}
MOMENTS = ("start", "training", "checkpoint", "end")
OUTPUTS = ("file", "file", "file", "tee", "head", "full", "closed")
TIMEOUT_S = 90.0  # for a run to end, and to resume
STOPPED_S = 0.5  # between STOP and CONT


@dataclass(frozen=True)
class Disturbance:
    """What happens to one run."""

    job: str
    output: str
    target: str
    signal: str
    moment: str
    delay: float  # seconds after the moment

    @staticmethod
    def draw(rng: random.Random) -> Disturbance:
        """Draw one; jobs without workers or evaluators get signals for the trainer only."""
        job = rng.choice(list(JOBS))
        targets = ["trainer", "group"] + ["worker"] * (job != "in-process") + ["evaluator"] * (job == "evaluators")
        target, moment = rng.choice(targets), rng.choice(MOMENTS)
        longest = {"start": 2.5, "training": 1.0, "checkpoint": 0.02, "end": 1.0}[moment]
        number = rng.choice(SIGNALS[target])
        return Disturbance(job, rng.choice(OUTPUTS), target, number, moment, rng.uniform(0, longest))

    @property
    def is_compared(self) -> bool:
        """Whether the run must equal an undisturbed one."""
        return (self.target, self.signal) != ("worker", "KILL")


@dataclass
class Outcome:
    """How a try ended."""

    lost: str = ""  # what went wrong
    differs: bool = False
    tracebacks: int = 0
    code: int | None = None


def train(job: str) -> list[str]:
    """The command of a run called `a`."""
    return [PROGRAM, "train", *COMMON, *JOBS[job], "--run-name", "a"]


def start(
    folder: Path, command: list[str], output: str
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes] | None]:
    """Start a run in its own process group with that output; returns also the process that reads it."""
    reader: subprocess.Popen[bytes] | None = None
    with (folder / "log").open("ab") as log, Path("/dev/full").open("ab") as full:
        target: Any = {"file": log, "full": full, "closed": None}.get(output)
        if output in ("tee", "head"):
            program = ["tee", "-a", "log"] if output == "tee" else ["head", "-n", "3"]
            reader = subprocess.Popen(program, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            target = reader.stdin
        if output == "closed":
            command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        process = subprocess.Popen(
            command, cwd=folder, stdout=target, stderr=target, start_new_session=True, preexec_fn=_default_signals
        )
    if reader is not None and reader.stdin is not None:
        reader.stdin.close()
    return process, reader


def _default_signals() -> None:
    for name in GRACEFUL:  # under nohup or in a background job some are ignored
        number = signal.Signals[f"SIG{name}"]
        signal.signal(number, signal.default_int_handler if name == "INT" else signal.SIG_DFL)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float = TIMEOUT_S) -> None:
    """Wait for a condition, or the end of the process."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end and not condition():
        time.sleep(0.002)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The complete records of metrics.jsonl."""
    path = folder / "runs/a/metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def last_step(folder: Path) -> int:
    """The step of the last iteration."""
    done = records(folder, "iteration")
    return int(done[-1]["step"]) if done else 0


def members(group: int) -> dict[int, str]:
    """The living processes of a group and their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, member = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def find(group: int, module: str) -> list[int]:
    """The processes of a group that run that module."""
    return [pid for pid, command in members(group).items() if module in command]


def disturb(plan: Disturbance, folder: Path, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Wait for the moment and send the signal; whether the run had begun to save by then."""
    checkpoints = folder / "runs/a/checkpoints"
    moments: dict[str, Callable[[], Any]] = {
        "start": lambda: True,
        "training": lambda: last_step(folder) > 0,
        "checkpoint": lambda: last_step(folder) > 0 and any(checkpoints.glob("*.tmp")),
        "end": lambda: last_step(folder) >= 0.8 * TIMESTEPS,
    }
    wait_until(moments[plan.moment], process)
    time.sleep(plan.delay)
    has_begun = (checkpoints / "step-000000000000.pt").exists() or last_step(folder) > 0
    if process.poll() is not None:
        return has_begun
    targets = [process.pid]
    if plan.target in MODULES:
        wait_until(lambda: find(process.pid, MODULES[plan.target]), process, 5)
        targets = find(process.pid, MODULES[plan.target])
    if plan.target == "group":
        os.killpg(process.pid, signal.Signals[f"SIG{plan.signal}"])
    elif targets:
        send(rng.choice(targets), plan.signal)
    return has_begun


def send(pid: int, name: str) -> None:
    """Send a signal; CONT follows a STOP."""
    try:
        os.kill(pid, signal.Signals[f"SIG{name}"])
        if name == "STOP":
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def attempt(number: int, seed: int, references: dict[str, Path]) -> tuple[Disturbance, Outcome]:
    """Disturb one run and resume it."""
    rng = random.Random(f"{seed} {number}")
    plan, outcome = Disturbance.draw(rng), Outcome()
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
        folder = Path(name)
        process, reader = start(folder, train(plan.job), plan.output)
        try:
            if plan.output == "tee" and reader is not None:
                wait_until(lambda: last_step(folder) > 0 or plan.moment == "start", process)
                reader.kill()
            has_begun = disturb(plan, folder, process, rng)
            outcome.code = process.wait(TIMEOUT_S)
            outcome.lost = judge(plan, folder, outcome.code, has_begun) or leftovers(process.pid)
            if not outcome.lost:
                resume(plan, folder, references[plan.job], outcome)
        except subprocess.TimeoutExpired:
            outcome.lost = "it did not end"
        finally:
            for pid in members(process.pid):
                send(pid, "KILL")
            if reader is not None:
                reader.kill()
                reader.wait()
        log = folder / "log"
        outcome.tracebacks = log.read_text(errors="replace").count("Traceback") if log.exists() else 0
        if outcome.lost or outcome.tracebacks:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            print(f"{plan}\n{outcome}\n{tail}", flush=True)
    return plan, outcome


def judge(plan: Disturbance, folder: Path, code: int, has_begun: bool) -> str:
    """What is wrong with how the disturbed run ended; empty if nothing."""
    number = signal.Signals[f"SIG{plan.signal}"]
    stops = plan.target in ("trainer", "group") and plan.signal != "STOP"
    if code not in ((0, 128 + number, -number) if stops else (0,)):
        return f"exit code {code}"
    saved = max((int(path.stem[5:]) for path in (folder / "runs/a/checkpoints").glob("step-*.pt")), default=0)
    if stops and plan.signal != "KILL" and has_begun and saved < last_step(folder):
        return f"saved {saved} of {last_step(folder)} steps"
    return ""


def leftovers(group: int) -> str:
    """Processes of the run that outlive it."""
    end = time.monotonic() + 5
    while members(group) and time.monotonic() < end:
        time.sleep(0.05)
    return f"still running: {list(members(group).values())}" if members(group) else ""


def resume(plan: Disturbance, folder: Path, reference: Path, outcome: Outcome) -> None:
    """Resume the run to its end and compare it."""
    has_run = (folder / "runs/a/config.yaml").exists()
    command = [PROGRAM, "train", "--resume", "runs/a"] if has_run else train(plan.job)
    process, _ = start(folder, command, "file")
    if (code := process.wait(TIMEOUT_S)) != 0:
        outcome.lost = f"resumed with exit code {code}"
    elif plan.is_compared:
        outcome.differs = not equals(results(folder), results(reference))


def results(folder: Path) -> Any:
    """The learned state at the end, and the evaluations by step."""
    from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
    from unidle.engine.checkpoint.run_folder import RunFolder

    path = RunFolder.open(folder / "runs/a").latest()
    assert path is not None
    returns = {record["step"]: record["eval/return_mean"] for record in records(folder, "evaluation")}
    return [path.name, load_checkpoint(path)["algo"], returns]


def equals(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equals(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equals, a, b))
    return bool(a == b)


def main() -> None:
    """Run the trial and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    flags = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
        references = {job: Path(name) / job for job in JOBS}
        for job, folder in references.items():
            folder.mkdir()
            process, _ = start(folder, train(job), "file")
            assert process.wait(TIMEOUT_S) == 0, (folder / "log").read_text()
        with ThreadPoolExecutor(flags.parallel) as executor:
            tries = list(executor.map(lambda number: attempt(number, flags.seed, references), range(flags.tries)))
    lost = [(plan, outcome) for plan, outcome in tries if outcome.lost]
    differing = [(plan, outcome) for plan, outcome in tries if outcome.differs]
    counts = {
        "tries": len(tries),
        "held": len(tries) - len(lost) - len(differing),
        "lost": len(lost),
        "differing": len(differing),
        "tracebacks": sum(outcome.tracebacks > 0 for _, outcome in tries),
        "not_compared": sum(not plan.is_compared for plan, _ in tries),
    }
    result = {
        **counts,
        "failures": [{**asdict(plan), **asdict(outcome)} for plan, outcome in lost + differing],
        "signals": dict(Counter(f"{plan.signal} to {plan.target}" for plan, _ in tries).most_common()),
        "moments": dict(Counter(plan.moment for plan, _ in tries)),
        "outputs": dict(Counter(plan.output for plan, _ in tries)),
        "jobs": dict(Counter(plan.job for plan, _ in tries)),
        "seed": flags.seed,
        "seconds": round(time.monotonic() - began),
        **provenance(),
    }
    print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
    print(save("fault_trial", result))


if __name__ == "__main__":
    main()
