"""Damages the files of runs, and config files, at random: each is refused with one sentence or used correctly.

Checkpoints are resumed and evaluated, config files resolved, metrics resumed and reported, by the same code as that of
the commands, in this process; every twentieth file by the command itself. What was resumed must end with the weights,
metrics and best policy of a run whose files were left alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from config_samples import CONFIGS, ENGINE
from disturbed_runs import PROGRAM, equals
from mutations import damaged

import unidle
from unidle.config.engine_file import read_engine_file
from unidle.config.files import flatten_sections, load_yaml
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import UsageError
from unidle.metrics.jsonl import read_records
from unidle.report.dashboard.page import write_page
from unidle.report.page.report import write_report

HALF, FULL = 128, 192
_EVERY = {"eval_every": 32, "eval_episodes": 2, "checkpoint_every": 32, "keep_checkpoints": 3}
_COMMON: dict[str, Any] = {
    "n_envs": 2,
    "net_arch": (8,),
    "device": "cpu",
    "subproc": False,
    "eval_workers": 0,
    **_EVERY,
}
_PPO: dict[str, Any] = {"n_steps": 8, "batch_size": 16, "n_epochs": 1, "normalize_obs": True, "activation": "relu"}
_SAC: dict[str, Any] = {"algo": "sac", "learning_starts": 32, "batch_size": 8, "buffer_size": 512}
JOBS: dict[str, dict[str, Any]] = {
    "ppo": {"env": "CartPole-v1", **_COMMON, **_PPO},
    "lstm": {"env": "CartPole-v1", **_COMMON, **_PPO, "recurrent": "lstm", "recurrent_size": 8},
    "sac": {"env": "Pendulum-v1", **_COMMON, **_SAC},
}
TEXTS = (*["config.yaml"] * 4, *["--config"] * 4, "--engine", *["metrics.jsonl"] * 3, "meter.jsonl", "changes.jsonl")
_SEGMENT = (
    '{"step": %d, "seconds": %d.5, "length": 0.5, "covered": 1.0, "gpu": null, "parts": {}, '
    '"host": {"environment": 0.5, "learn": 0.5}, "readings": {"cores": 1.5}, "spans": [["host", "learn", 0.0, 0.5]]}'
)
COMMAND_EVERY = 20
LIMIT_S = 30  # for one try in this process
_MAX_SENTENCE = 1000  # characters


class _Hang(BaseException):
    pass


class _WrongError(Exception):
    """What was used is not what the file says, or not what it was before it was damaged."""


@dataclass
class _Job:
    """A run of HALF steps, and what it must become."""

    name: str
    folder: Path
    final: dict[str, Any]  # after FULL steps
    returns: dict[str, list[float]]  # an evaluation of each policy

    def copy(self, to: Path) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        return Path(shutil.copytree(self.folder, to))


def attempts(part: str, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    """One record for each try."""
    with tempfile.TemporaryDirectory(prefix="fault-trial-") as name:
        os.environ.update(XDG_STATE_HOME=f"{name}/state", WANDB_MODE="offline")
        signal.signal(signal.SIGALRM, _hang)
        jobs = [_prepare(job, Path(name)) for job in JOBS]
        for number in numbers:
            yield _attempt(part, number, random.Random(f"{part} {seed} {number}"), jobs, Path(name) / "copy")


def _hang(*_: object) -> None:
    raise _Hang


def _prepare(name: str, folder: Path) -> _Job:
    settings = {**JOBS[name], "runs_dir": str(folder / "half"), "run_name": name, "quiet": True}
    with contextlib.redirect_stderr(io.StringIO()):
        unidle.train(settings.pop("env"), timesteps=HALF // 2, seed=len(name), **settings)
        changes: dict[str, Any] = {"learning_rate": 1e-3, "env_timeout": 200}  # for changes.jsonl
        half = unidle.resume(folder / "half" / name, timesteps=HALF, quiet=True, **changes)
        with (half.path / "meter.jsonl").open("a") as file:  # too short a run to have any
            file.writelines(_SEGMENT % (HALF * part // 8, part) + "\n" for part in range(1, 9))
        job = _Job(name, half.path, {}, {})
        whole = job.copy(folder / "whole" / name)
        unidle.resume(whole, timesteps=FULL, quiet=True)
        job.final = _results(whole)
        for path in (half.folder.best, *half.folder.saved()):
            copy = job.copy(folder / "one" / name)
            for other in RunFolder.open(copy).policies():
                if other.name != path.name:
                    other.unlink()
            job.returns[path.name] = unidle.load(copy).evaluate(2).returns
    return job


def _results(run: Path) -> dict[str, Any]:
    path = RunFolder.open(run).latest()
    assert path is not None
    state, best = load_checkpoint(path), load_checkpoint(run / "checkpoints" / "best.pt", policy_only=True)
    records = [each for each in read_records(run / "metrics.jsonl") if each["step"] > HALF]
    return {
        "learned state": state["algo"],
        "progress": [state["step"], state["best_step"], state["best_return"]],
        "best policy": [best["step"], best["algo"]],
        "metrics": [[each.get("kind"), each["step"], each.get("eval/return_mean")] for each in records],
    }


def _require_same(found: dict[str, Any], expected: dict[str, Any], names: tuple[str, ...] = ()) -> None:
    differing = [name for name in names or tuple(expected) if not equals(found[name], expected[name])]
    if differing:
        raise _WrongError(f"differs in {', '.join(differing)}")


# -- one try -----------------------------------------------------------------------------------------------------------


def _attempt(part: str, number: int, rng: random.Random, jobs: list[_Job], copy: Path) -> dict[str, Any]:
    job = rng.choice(jobs)
    by_command = number % COMMAND_EVERY == 0
    record: dict[str, Any] = {
        "number": number,
        "what": "",
        "damage": "",
        "outcome": "",
        "lost": "",
        "loaded as something else": "",
        "tracebacks": 0,
        "hangs": False,
        "through the command line": by_command,
    }
    said = io.StringIO()
    signal.alarm(LIMIT_S + 90 * by_command)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            run = _checkpoint if part == "checkpoints" else _text
            record["outcome"] = run(record, rng, job, jobs, copy, by_command)
    except _WrongError as wrong:
        record["loaded as something else"] = str(wrong)
    except (_Hang, subprocess.TimeoutExpired):
        record["hangs"] = True
    except Exception:
        record["tracebacks"] = 1
        record["lost"] = traceback.format_exc()[-2000:]
    finally:
        signal.alarm(0)
    if not record["outcome"]:
        record["outcome"] = "failed"
        print(json.dumps(record, indent=1), said.getvalue()[-1500:], flush=True)
    return record


def _damage(record: dict[str, Any], path: Path, rng: random.Random, others: list[bytes], *, is_text: bool) -> None:
    record["damage"], content = damaged(path.read_bytes(), rng, others, is_text=is_text)
    path.write_bytes(content)


def _refusal(call: Callable[[], object]) -> str | None:
    """The sentence with which a call is refused; None if it is not."""
    try:
        call()
    except UsageError as error:
        if "\n" in str(error) or len(str(error)) > _MAX_SENTENCE:
            raise AssertionError(f"not one sentence: {error}") from None
        return str(error)
    return None


def _command(run: Path, *words: object) -> str | None:
    """Run a command; the sentence with which it ends, None if it succeeds."""
    command = [PROGRAM, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=run.parent, env=environment, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    if "Traceback" in said or done.returncode not in (0, 2):
        raise AssertionError(f"exit code {done.returncode}: {said[-1500:]}")
    last = done.stderr.splitlines()[-1:] or [""]
    if done.returncode and not last[0].startswith("unidle: "):
        raise AssertionError(f"no sentence: {said[-1500:]}")
    return last[0] if done.returncode else None


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _checkpoint(
    record: dict[str, Any], rng: random.Random, job: _Job, jobs: list[_Job], copy: Path, by_command: bool
) -> str:
    folder = RunFolder.open(job.copy(copy))
    others = [path.read_bytes() for each in jobs for path in RunFolder.open(each.folder).policies()]
    which = rng.choice(["newest", "newest", "newest", "newest", "two newest", "best", "best", "all"])
    record["what"] = f"{which} of {job.name}"
    paths = {"best": [folder.best], "all": folder.policies(), "two newest": folder.saved()[-2:]}
    for path in paths.get(which, folder.saved()[-1:]):
        _damage(record, path, rng, others, is_text=False)
    before = {path.name: path.read_bytes() for path in folder.checkpoints.iterdir()}
    if which == "best":
        return _evaluate(job, copy, by_command)
    resume = (
        (lambda: _command(copy, "train", "--resume", copy, "--timesteps", FULL))
        if by_command
        else (lambda: _refusal(lambda: unidle.resume(copy, timesteps=FULL, quiet=True)))
    )
    refused = resume()
    if which == "all":
        if refused is None or "All checkpoints" not in refused:
            raise _WrongError(f"resumed: {refused}")
        if {path.name: path.read_bytes() for path in folder.checkpoints.iterdir()} != before:
            raise _WrongError("the damaged files have changed")
        return "refused: no checkpoint is sound"
    if refused is not None:
        raise AssertionError(f"sound checkpoints were not used: {refused}")
    _require_same(_results(copy), job.final)
    kept = [name for name in before if (folder.checkpoints / f"{name}.damaged").exists()]
    return "an older checkpoint was used" if kept else "the same as before"


def _evaluate(job: _Job, copy: Path, by_command: bool) -> str:
    """A damaged best policy is passed over, for the newest checkpoint."""
    if by_command:
        if refused := _command(copy, "eval", copy, "--episodes", 2):
            raise AssertionError(refused)
        return "another policy was evaluated"
    returns = unidle.load(copy).evaluate(2).returns
    if returns != job.returns[RunFolder.open(job.folder).saved()[-1].name]:
        raise _WrongError(f"evaluated to {returns}")
    return "another policy was evaluated"


# -- texts -------------------------------------------------------------------------------------------------------------


def _text(record: dict[str, Any], rng: random.Random, job: _Job, jobs: list[_Job], copy: Path, by_command: bool) -> str:
    record["what"] = what = rng.choice(TEXTS)
    others = [(each.folder / "config.yaml").read_bytes() for each in jobs]
    if what in ("--config", "--engine"):
        copy.parent.mkdir(exist_ok=True)
        style = rng.choice(list(CONFIGS)) if what == "--config" else "engine"
        path = copy.with_name("given.yaml")
        path.write_text(CONFIGS.get(style, ENGINE))
        _damage(record, path, rng, [text.encode() for text in (*CONFIGS.values(), ENGINE)], is_text=True)
        return _use_given(what, style, path, by_command)
    path = job.copy(copy) / what
    if what != "config.yaml":
        others = [(each.folder / name).read_bytes() for each in jobs for name in ("metrics.jsonl", "meter.jsonl")]
    _damage(record, path, rng, others, is_text=True)
    if what == "config.yaml":
        return _use_config(job, copy, by_command)
    return _use_records(job, copy, what, by_command)


def _use_given(what: str, style: str, path: Path, by_command: bool) -> str:
    """A config or engine file of the user."""
    if by_command:
        small = "--env CartPole-v1 --timesteps 64 --n-envs 2 --n-steps 8 --batch-size 16 --net-arch 8 --device cpu"
        words = [
            *small.split(),
            "--no-subproc",
            "--eval-every",
            0,
            "--quiet",
            "--run-name",
            f"given-{path.stat().st_mtime_ns}",
        ]
        return "refused" if _command(path, "train", what, path, *words) else "used"
    found: list[dict[str, Any]] = []

    def read() -> None:
        if what == "--engine":
            found.append(read_engine_file(path).values)
            return
        layers = resolve_layers(None, path, False, "CartPole-v1", None, None)
        flags = {"env": "CartPole-v1", "n_envs": 8}
        validated(layers.with_flags(flags), layers.preset_batch_size)
        found.append({} if style != "unidle" else layers.config.flat())

    if _refusal(read) is not None:
        return "refused"
    if found[0]:
        _require_as_written(path, found[0])
    return "used"


def _use_config(job: _Job, copy: Path, by_command: bool) -> str:
    """The config of a run: the policy, its training and its pages are those of before, or refused."""
    if by_command:
        refused = [_command(copy, "report", copy), _command(copy, "eval", copy, "--episodes", 2)]
        refused.append(_command(copy, "train", "--resume", copy, "--timesteps", FULL, "--eval-every", 0))
        if refused[-1] is None:
            _require_same(_results(copy), job.final, ("learned state",))
        return "refused" if any(refused) else "used"
    sentences = [_refusal(lambda: load_yaml(copy / "config.yaml"))]
    if sentences[0] is None:
        _require_as_written(copy / "config.yaml", load_yaml(copy / "config.yaml").flat())
    sentences += [_refusal(lambda: write_report(copy)), _refusal(lambda: write_page(copy, copy / "page.html"))]
    returns: list[float] = []
    sentences.append(_refusal(lambda: returns.extend(unidle.load(copy).evaluate(2, seed=_seed(job)).returns)))
    if sentences[-1] is None and returns != job.returns["best.pt"]:
        raise _WrongError(f"evaluated to {returns}, not {job.returns['best.pt']}")
    sentences.append(_refusal(lambda: unidle.resume(copy, timesteps=FULL, eval_every=0, quiet=True)))
    if sentences[-1] is None:
        _require_same(_results(copy), job.final, ("learned state",))
    return "refused" if any(sentences) else "used"


def _seed(job: _Job) -> int:
    """That of the evaluations before: a seed that was edited in the file is not damage to the policy."""
    return load_yaml(job.folder / "config.yaml").run.seed + 1


def _use_records(job: _Job, copy: Path, name: str, by_command: bool) -> str:
    """The records of a run: its pages and its training go on with the lines that are sound."""
    sound = _sound_lines(copy / name)
    if by_command:
        refused = _command(copy, "report", copy) or _command(copy, "train", "--resume", copy, "--timesteps", FULL)
    else:
        refused = _refusal(lambda: (write_report(copy), write_page(copy, copy / "page.html")))
        unidle.load(copy).summary()
        refused = refused or _refusal(lambda: unidle.resume(copy, timesteps=FULL, quiet=True))
    if refused is not None:
        raise AssertionError(f"refused: {refused}")
    _require_same(_results(copy), job.final)
    kept = [json.loads(line) for line in (copy / name).read_bytes().splitlines()][: len(sound)]
    if kept != sound and json.dumps(kept) != json.dumps(sound):  # NaN differs from itself
        raise _WrongError("sound lines were lost")
    return "used"


def _sound_lines(path: Path) -> list[dict[str, Any]]:
    """The records up to HALF, as an independent reader finds them."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= HALF:
                found.append(record)
    return found


def _require_as_written(path: Path, settings: dict[str, Any]) -> None:
    """Each setting in the file has the value that the file gives."""
    with path.open(encoding="utf-8") as file:
        tree = yaml.safe_load(file)
    written = {**tree.pop("engine", {}), **tree} if "machine" in tree else flatten_sections(tree, str(path))
    for name, value in written.items():
        if name in settings and not _is_same(value, settings[name]):
            raise _WrongError(f"{name}: {value!r} became {settings[name]!r}")


def _is_same(written: Any, used: Any) -> bool:
    if isinstance(used, tuple):
        parts = written.split(",") if isinstance(written, str) else written
        return len(parts) == len(used) and all(map(_is_same, parts, used))
    if used is None:
        return written in (None, "none", "auto")
    if isinstance(used, (int, float)) and not isinstance(used, bool):
        return not isinstance(written, bool) and float(written) == float(used)
    return bool(written == used) or (written is False and used == "off")
