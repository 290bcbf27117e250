"""Disturbs runs at random, resumes each, and compares it bit for bit with a run that was left alone.

Signals go to the trainer, its process group, a worker or an evaluator; disks fill up or become read-only
(`bad_disks.py`); environments have children (`child_envs.py`); output goes to a file, to `tee` that is killed, to
`head`, to a closed descriptor or to a full disk. It happens at start-up, when evaluators start, during training, during
a checkpoint, near the end, or after the last step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bad_disks import FILE_SIZE, KINDS, RUN_FOLDER, SHARED, Disk
from child_envs import LEFT_BEHIND
from child_envs import PROGRAM as STARTED

PROGRAM = str(Path(sys.executable).with_name("unidle"))
TIMESTEPS = 4096
COMMON = (
    f"--preset classic --n-envs 4 --n-steps 32 --batch-size 32 --n-epochs 2 --net-arch 16 --timesteps {TIMESTEPS} "
    "--eval-every 1024 --eval-episodes 2 --checkpoint-every 256 --run-name a"
).split()
JOBS = {
    "in-process": ["--no-subproc", "--eval-workers", "0"],
    "workers": ["--subproc", "--workers", "2", "--eval-workers", "0"],
    "evaluators": ["--no-subproc", "--eval-workers", "2"],
    "workers and evaluators": ["--subproc", "--workers", "2", "--eval-workers", "1"],
    "overlap": ["--subproc", "--workers", "2", "--eval-workers", "0", "--overlap", "strict"],
}
RUN = "runs/a"
PLAIN = "CartPole-v1"
ENVS = (PLAIN, *(f"child_envs:{name}" for name in ("Forks", "StartsPrograms", "LeavesChildren", "InstallsHandlers")))
GRACEFUL = ("INT", "TERM", "HUP", "USR1")
SIGNALS = {
    "trainer": (*GRACEFUL, "KILL", "STOP"),
    "group": GRACEFUL,
    "worker": (*GRACEFUL, "KILL", "STOP"),
    "evaluator": (*GRACEFUL, "KILL", "STOP"),
    "disk": ("",),
}
MODULES = {"worker": "unidle.envs.pool.worker", "evaluator": "unidle.engine.evaluate.worker_main"}
MOMENTS = ("start", "evaluators", "training", "checkpoint", "end")
OUTPUTS = ("file", "file", "file", "tee", "head", "full", "closed")
_OF_UNIDLE = re.compile(r'File "[^"]*/(unidle/[^"]*|child_envs)\.py"')
TIMEOUT_S = 120.0  # for a run to end, and to resume
STOPPED_S = 0.5  # between STOP and CONT


@dataclass(frozen=True)
class Disturbance:
    """What happens to one run."""

    job: str
    env: str
    output: str
    target: str  # of the signal; "disk": the disk fails instead
    signal: str
    disk: str
    moment: str
    step: int  # from which on it may happen
    delay: float  # seconds after the moment

    @staticmethod
    def draw(rng: random.Random, *, can_mount: bool) -> Disturbance:
        """Draw one; a job without workers or evaluators gets signals for the trainer only."""
        job = rng.choices(list(JOBS), (3, 3, 2, 1, 2))[0]  # evaluators take long to start
        targets = ["trainer", "group"] + ["worker"] * ("--subproc" in JOBS[job])
        targets += ["evaluator"] * ("evaluators" in job)
        is_disk = rng.random() < 0.35
        env = PLAIN if is_disk or rng.random() < 0.5 else rng.choice(ENVS[1:])
        target, disk, output = rng.choice(targets), "sound", rng.choice(OUTPUTS)
        if is_disk:
            target, disk = "disk", rng.choice(KINDS if can_mount else (FILE_SIZE,))
            output = "cat" if disk == FILE_SIZE else "file"  # the limit would hold for the file of its output too
        moment = rng.choice([each for each in MOMENTS if each != "evaluators" or "evaluators" in job])
        longest = {"start": 2.5, "evaluators": 1.5, "checkpoint": 0.02}.get(moment, 0.05)
        step = rng.randrange(1, TIMESTEPS * 3 // 4)
        if moment == "end":
            step = rng.choice([TIMESTEPS * 7 // 8, TIMESTEPS, TIMESTEPS])
        if moment in ("start", "evaluators"):
            step = 0
        return Disturbance(
            job, env, output, target, rng.choice(SIGNALS[target]), disk, moment, step, rng.uniform(0, longest)
        )

    @property
    def is_compared(self) -> bool:
        """Whether the run must equal an undisturbed one: a worker that was killed restarts its episodes."""
        return (self.target, self.signal) != ("worker", "KILL")

    @property
    def stops(self) -> bool:
        """Whether it may stop the run."""
        return self.target in ("trainer", "group") and self.signal != "STOP"


@dataclass
class Outcome:
    """How a try ended."""

    lost: str = ""  # what went wrong
    differs: str = ""  # in what
    tracebacks: int = 0
    code: int | None = None
    is_late: bool = False  # the run had ended by itself before

    @property
    def is_held(self) -> bool:
        """Whether everything is as it should be."""
        return not (self.lost or self.differs or self.tracebacks)


# -- processes ---------------------------------------------------------------------------------------------------------


def train(job: str, env: str = PLAIN) -> list[str]:
    """The command of a run called `a`."""
    return [PROGRAM, "train", "--env", env, *COMMON, *JOBS[job]]


def start(
    folder: Path, command: list[str], output: str = "file"
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes] | None]:
    """Start a run in its own process group with that output; returns also the process that reads it."""
    reader: subprocess.Popen[bytes] | None = None
    with (folder / "log").open("ab") as log, Path("/dev/full").open("ab") as full:
        target: Any = {"file": log, "full": full, "closed": None}.get(output)
        if output in ("tee", "head", "cat"):
            program = {"tee": ["tee", "-a", "log"], "head": ["head", "-n", "3"], "cat": ["cat"]}[output]
            sink = log if output == "cat" else subprocess.DEVNULL
            reader = subprocess.Popen(program, cwd=folder, stdin=subprocess.PIPE, stdout=sink)
            target = reader.stdin
        if output == "closed":
            command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        found = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        paths = {"PYTHONPATH": os.pathsep.join(found), "XDG_STATE_HOME": str(folder / "state")}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
            stdout=target,
            stderr=target,
            start_new_session=True,
            preexec_fn=_default_signals,
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
        time.sleep(0.005)


def members(group: int) -> dict[int, str]:
    """The living processes of a group and their command lines, without the children of environments."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            before, _, after = (entry / "stat").read_text().rpartition(")")
            state, _, member = after.split()[:3]
            if int(member) == group and state not in "ZX" and not before.endswith((f"({LEFT_BEHIND}", f"({STARTED}")):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def find(group: int, module: str) -> list[int]:
    """The processes of a group that run that module."""
    return [pid for pid, command in members(group).items() if module in command]


def send(pid: int, name: str) -> None:
    """Send a signal; CONT follows a STOP."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[f"SIG{name}"])
        if name == "STOP":
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)


# -- run folders -------------------------------------------------------------------------------------------------------


def records(folder: Path, kind: str, run: str = RUN) -> list[dict[str, Any]]:
    """The complete records of metrics.jsonl."""
    path = folder / run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def last_step(folder: Path, run: str = RUN) -> int:
    """The step of the last iteration that metrics.jsonl has."""
    try:
        with (folder / run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            complete = file.read().rpartition(b"\n")[0]
    except OSError:
        return 0
    steps = re.findall(rb'"kind": "iteration", "step": (\d+)', complete)
    return int(steps[-1]) if steps else 0


def results(folder: Path, run: str = RUN) -> dict[str, Any]:
    """The learned state at the end, the best policy, and the evaluations by step."""
    from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
    from unidle.engine.checkpoint.run_folder import RunFolder

    opened = RunFolder.open(folder / run)
    path = opened.latest()
    assert path is not None
    best = load_checkpoint(opened.best, policy_only=True)
    return {
        "last checkpoint": path.name,
        "learned state": load_checkpoint(path)["algo"],
        "best policy": [best["step"], best["algo"]],
        "iterations": [record["step"] for record in records(folder, "iteration", run)],
        "evaluations": {record["step"]: record["eval/return_mean"] for record in records(folder, "evaluation", run)},
    }


def equals(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equals(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equals, a, b))
    return bool(a == b)


# -- one try -----------------------------------------------------------------------------------------------------------


def attempt(
    number: int, seed: int, references: dict[bool, dict[str, Any]], *, can_mount: bool
) -> tuple[Disturbance, Outcome]:
    """Disturb one run, resume it and compare its results with those in `references`."""
    rng = random.Random(f"{seed} {number}")
    plan, outcome = Disturbance.draw(rng, can_mount=can_mount), Outcome()
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
        folder = Path(name)
        with Disk(plan.disk, folder / "runs", rng).mounted() as disk:
            try:
                _disturb_and_resume(plan, folder, disk, references[plan.job == "overlap"], outcome, rng)
            except subprocess.TimeoutExpired:
                outcome.lost = "it did not end"
            except Exception as error:  # a file that cannot be read
                outcome.lost = f"{type(error).__name__}: {error}"
        log = folder / "log"
        text = log.read_text(errors="replace") if log.exists() else ""
        # Ctrl-C before Python has started is Python's to handle: its traceback has no line of unidle.
        outcome.tracebacks = sum(bool(_OF_UNIDLE.search(part)) for part in text.split("Traceback (most recent")[1:])
        if not outcome.is_held:
            print(f"{number}: {plan}\n{outcome}\n{text[:1500]} … {text[-1500:]}", flush=True)
    return plan, outcome


def _disturb_and_resume(
    plan: Disturbance, folder: Path, disk: Disk, reference: dict[str, Any], outcome: Outcome, rng: random.Random
) -> None:
    with contextlib.ExitStack() as running:  # to the end: a child that was left behind must not hold the run's lock
        process, reader = running.enter_context(_running(folder, disk.wrap(train(plan.job, plan.env)), plan.output))
        if plan.output == "tee" and reader is not None:
            wait_until(lambda: last_step(folder) > 0 or plan.moment == "start", process)
            reader.kill()
        has_begun = disturb(plan, folder, process, disk, rng, outcome)
        outcome.code = process.wait(TIMEOUT_S)
        if reader is not None and plan.output == "cat":
            reader.wait(TIMEOUT_S)
        outcome.lost = judge(plan, folder, outcome.code, has_begun) or leftovers(process.pid)
        has_run = (folder / "runs/a/config.yaml").exists()
        again = [PROGRAM, "train", "--resume", "runs/a"] if has_run else train(plan.job, plan.env)
        if not outcome.lost and plan.disk in RUN_FOLDER and rng.random() < 0.3:  # before the disk is repaired
            process, _ = running.enter_context(_running(folder, again))
            outcome.lost = _judge_disk(folder, process.wait(TIMEOUT_S))
        if outcome.lost:
            return
        disk.repair()
        process, _ = running.enter_context(_running(folder, again))
        code = process.wait(TIMEOUT_S)
    if code != 0:
        outcome.lost = f"resumed with exit code {code}"
    elif plan.is_compared:
        found = results(folder)
        outcome.differs = ", ".join(name for name in found if not equals(found[name], reference[name]))


@contextlib.contextmanager
def _running(
    folder: Path, command: list[str], output: str = "file"
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes] | None]]:
    """A process, of which nothing is left afterwards."""
    process, reader = start(folder, command, output)
    try:
        yield process, reader
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the children that an environment left behind
        process.wait()
        if reader is not None:
            reader.kill()
            reader.wait()


def disturb(
    plan: Disturbance,
    folder: Path,
    process: subprocess.Popen[bytes],
    disk: Disk,
    rng: random.Random,
    outcome: Outcome,
) -> bool:
    """Wait for the moment, then send the signal or let the disk fail; whether the run had begun to save by then."""
    checkpoints = folder / "runs/a/checkpoints"
    wait_until(lambda: last_step(folder) >= plan.step, process)
    if plan.moment == "checkpoint":
        wait_until(lambda: any(checkpoints.glob("*.tmp")), process)
    if plan.moment == "evaluators":
        wait_until(lambda: find(process.pid, MODULES["evaluator"]), process)
    time.sleep(plan.delay)
    has_begun = (checkpoints / "step-000000000000.pt").exists() or last_step(folder) > 0
    if process.poll() is not None:
        outcome.is_late = plan.disk not in (*SHARED, "too small", "read-only from the start")
        return has_begun
    targets = [process.pid]
    if plan.target in MODULES:
        wait_until(lambda: find(process.pid, MODULES[plan.target]), process, 5)
        targets = find(process.pid, MODULES[plan.target])
    if plan.target == "disk":
        if plan.disk != "read-only from the start":
            disk.strike(process.pid)
    elif plan.target == "group":
        os.killpg(process.pid, signal.Signals[f"SIG{plan.signal}"])
    elif targets:
        send(rng.choice(targets), plan.signal)
    else:
        outcome.is_late = True
    return has_begun


def judge(plan: Disturbance, folder: Path, code: int, has_begun: bool) -> str:
    """What is wrong with how the disturbed run ended; empty if nothing."""
    if plan.target == "disk":
        return _judge_disk(folder, code, may_fail=plan.disk not in SHARED)
    number = signal.Signals[f"SIG{plan.signal}"]
    if code not in ((0, 128 + number, -number) if plan.stops else (0,)):
        return f"exit code {code}"
    saved = max((int(path.stem[5:]) for path in (folder / "runs/a/checkpoints").glob("step-*.pt")), default=0)
    if plan.stops and plan.signal != "KILL" and has_begun and saved < last_step(folder):
        return f"saved {saved} of {last_step(folder)} steps"
    return ""


def _judge_disk(folder: Path, code: int, *, may_fail: bool = True) -> str:
    """A run that cannot be written ends with one sentence."""
    if code == 0:
        return ""
    if not may_fail or code not in (1, 2):
        return f"exit code {code}"
    lines = (folder / "log").read_text(errors="replace").splitlines()
    if not lines or not lines[-1].startswith("unidle: "):
        return "no sentence at the end"
    return ""


def leftovers(group: int) -> str:
    """Processes of the run that outlive it."""
    end = time.monotonic() + 5
    while members(group) and time.monotonic() < end:
        time.sleep(0.05)
    return f"still running: {list(members(group).values())}" if members(group) else ""


def reference_results(numbers: range, seed: int, *, can_mount: bool) -> dict[bool, dict[str, Any]]:
    """The results of undisturbed runs, without overlap and with it: workers and evaluators change nothing."""
    found = {}
    plans = [Disturbance.draw(random.Random(f"{seed} {number}"), can_mount=can_mount) for number in numbers]
    for has_overlap in {plan.job == "overlap" for plan in plans}:
        job = "overlap" if has_overlap else "in-process"
        with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
            folder = Path(name)
            process, _ = start(folder, train(job))
            if process.wait(TIMEOUT_S) != 0:
                raise SystemExit((folder / "log").read_text())
            found[has_overlap] = results(folder)
    return found
