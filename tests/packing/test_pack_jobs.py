"""What a jobs.yaml and the command line may contain, and the sentence for each mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from unidle.errors import UsageError
from unidle.packing.jobs import Job, jobs_from_arguments, read_jobs


def read(folder: Path, text: str) -> list[Job]:
    path = folder / "jobs.yaml"
    path.write_text(text)
    return read_jobs(path)


def test_file_with_every_key_is_read(tmp_path: Path) -> None:
    text = """
jobs:
  - name: a
    command: python train.py --name 'two words'
    cores: 6
    gpu_memory: 4 GB
    env: {SEED: 1, MODE: fast}
    cwd: experiments
  - name: b.2
    command: [python, train.py, --lr, 0.001]
    gpu_memory: 1.5
"""
    first, second = read(tmp_path, text)
    assert first.command == ("python", "train.py", "--name", "two words")
    assert (first.cores, first.gpu_memory, first.env) == (6, 4 * 10**9, {"SEED": "1", "MODE": "fast"})
    assert first.cwd == Path("experiments")
    assert second.command == ("python", "train.py", "--lr", "0.001")
    assert (second.cores, second.gpu_memory, second.env, second.cwd) == (None, 3 * 2**29, {}, Path())


@pytest.mark.parametrize(
    ("text", "size"), [("500 MB", 500 * 10**6), ("2 GiB", 2 * 2**30), ("2", 2 * 2**30), ("100MiB", 100 * 2**20)]
)
def test_gpu_memory_has_units(tmp_path: Path, text: str, size: int) -> None:
    (job,) = read(tmp_path, f"jobs: [{{name: a, command: x, gpu_memory: {text}}}]")
    assert job.gpu_memory == size


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "jobs.yaml is empty; list the jobs under `jobs:`, each with `name` and `command`."),
        ("  \n", "jobs.yaml is empty; list"),
        ("jobs: []", "jobs.yaml has no jobs; list them under `jobs:`"),
        ("jobs: {a: b}", "jobs.yaml has no jobs; list them under `jobs:`"),
        ("job: []", "jobs.yaml has an unknown key `job`; did you mean `jobs`?"),
        ("- name: a", "jobs.yaml must contain `name: value` lines."),
        ("jobs: [train]", "jobs.yaml, job 1 is 'train'; write `name: …` and `command: …`."),
        ("jobs: [{name: a}]", "jobs.yaml, job 1 has no `command`; add it."),
        ("jobs: [{command: a}]", "jobs.yaml, job 1 has no `name`; add it."),
        ("jobs: [{name: a, command: b, core: 2}]", "jobs.yaml, job 1 has an unknown key `core`; did you mean `cores`?"),
        ("jobs: [{name: a, command: b, 7: 2}]", "unknown key `7`; use name, command, cores, gpu_memory, env, cwd."),
        ("jobs: [{name: a/b, command: c}]", "`name` is 'a/b'; use letters, digits and . _ -, such as seed-1."),
        ("jobs: [{name: 1, command: c}]", "`name` is 1; use letters"),
        (
            "jobs: [{name: a, command: b}, {name: a, command: c}]",
            "jobs.yaml has 2 jobs named `a`; give each its own name.",
        ),
        ("jobs: [{name: a, command: 7}]", "jobs.yaml, job `a`: `command` is 7; write a command"),
        ("jobs: [{name: a, command: [x, [y]]}]", "`command` is ['x', ['y']]; write its words as text."),
        ('jobs: [{name: a, command: "x \'y"}]', "`command` has an unclosed quote; close it."),
        ("jobs: [{name: a, command: x && y}]", "is not run by a shell, so it cannot use `&&`; write: bash -c '…'."),
        ("jobs: [{name: a, command: b, cores: 0}]", "`cores` is 0; write how many, from 1."),
        ("jobs: [{name: a, command: b, cores: true}]", "`cores` is True; write how many"),
        ("jobs: [{name: a, command: b, gpu_memory: lots}]", "`gpu_memory` is 'lots'; write it in GiB, or as 500 MB"),
        ("jobs: [{name: a, command: b, gpu_memory: 0}]", "`gpu_memory` is 0; write it in GiB"),
        ("jobs: [{name: a, command: b, gpu_memory: 4 TB}]", "`gpu_memory` is '4 TB'; write it in GiB"),
        ("jobs: [{name: a, command: b, env: [X]}]", "`env` is ['X']; write `NAME: value` lines."),
        ("jobs: [{name: a, command: b, env: {X: true}}]", "`X` in `env` is True; write the value in quotes."),
        ("jobs: [{name: a, command: b, env: {X=: 1}}]", "`env` has 'X=', which cannot be a variable's name"),
        ("jobs: [{name: a, command: b, cwd: 3}]", "`cwd` is 3; write a folder."),
    ],
)
def test_mistake_in_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        read(tmp_path, text)


def test_commands_on_the_command_line_are_numbered() -> None:
    first, second = jobs_from_arguments(["--", "python", "a.py", "--seed", "1", "--", "b"])
    assert (first.name, first.command) == ("job-1", ("python", "a.py", "--seed", "1"))
    assert (second.name, second.command) == ("job-2", ("b",))


@pytest.mark.parametrize("argv", [["--"], ["--", "a", "--"], ["--", "--", "a"]])
def test_missing_command_is_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="no command after a `--`"):
        jobs_from_arguments(argv)


def test_missing_program_or_folder_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Job `a`: program `no-such-program` not found; check the command"):
        Job("a", ("no-such-program",)).require_program()
    with pytest.raises(UsageError, match="Job `a`: there is no folder nowhere; correct its `cwd`"):
        Job("a", ("python",), cwd=Path("nowhere")).require_program()


def test_program_is_found_in_its_folder_and_on_its_own_path(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    Job("a", ("./train.sh",), cwd=tmp_path).require_program()
    Job("a", ("train.sh",), env={"PATH": f"{tmp_path}{os.pathsep}/bin"}).require_program()
    with pytest.raises(UsageError, match="not found"):
        Job("a", ("./train.sh",)).require_program()
