"""`unidle slurm`: the script as text and as bash reads it, named jobs, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unidle.cli.main import run
from unidle.cli.slurm import _SlurmFlags
from unidle.cli.sweep import SweepFlags
from unidle.cli.train import TrainFlags
from unidle.config import Config
from unidle.config.jobs import job_names, load_job
from unidle.config.renamed import ALIASES, RENAMED
from unidle.config.settings import RECIPES
from unidle.groups.folder import GroupFolder
from unidle.slurm import script as script_module
from unidle.slurm.resources import array_of, seconds_of_limit

CARTPOLE = ["--env", "CartPole-v1", "--timesteps", "4096"]
TIME = ["--time", "1:00:00"]
PRINT_ARGUMENTS = "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\n"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "NUM_PARALLEL_ENVS", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    python = SimpleNamespace(executable="/venv/bin/python", prefix="/venv", base_prefix="/usr")
    monkeypatch.setattr(script_module, "sys", python)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = run(["slurm", *words, "--dry-run"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["slurm", *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("unidle: ")
    assert printed.count("\n") == 1
    return printed


# -- the text ----------------------------------------------------------------------------------------------------------


def test_dry_run_prints_the_script_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = dry_run(
        capsys,
        *("train", *CARTPOLE, "--partition", "gpu", "--gres", "gpu:a100:1", "--time", "8:00:00", "--signal", "90"),
        *("--mem=16G", "--account", "lab", "--cpus-per-task", "4", "--sbatch", "--exclusive --mail-type=END"),
    )
    run_folder = tmp_path / "runs" / "CartPole-v1-ppo-classic-seed0"
    assert (
        text
        == f"""\
#!/bin/bash
#SBATCH --job-name=CartPole-v1-ppo-classic-seed0
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --gres=gpu:a100:1
#SBATCH --mem=16G
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=8:00:00
#SBATCH --exclusive
#SBATCH --mail-type=END
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={run_folder}/slurm-%j.out

cd {tmp_path} || exit 1
export VIRTUAL_ENV=/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
exec /venv/bin/python -m unidle.slurm --folder {run_folder} --cores 4 -- \\
  train --env CartPole-v1 --timesteps 4096 --run-name CartPole-v1-ppo-classic-seed0 --resume auto
"""
    )
    assert list(tmp_path.iterdir()) == []


def test_script_of_the_meta_world_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    run_folder = tmp_path / "runs" / "mt10"
    assert (
        dry_run(capsys, "mt10-2m", "--partition", "gpu", "--run-name", "mt10", "--wandb")
        == f"""\
#!/bin/bash
#SBATCH --job-name=mt10
#SBATCH --partition=gpu
#SBATCH --gres=gpu:a40:1
#SBATCH --mem=32G
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=2:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={run_folder}/slurm-%j.out

cd {tmp_path} || exit 1
export WANDB_MODE=offline
export VIRTUAL_ENV=/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
exec /venv/bin/python -m unidle.slurm --folder {run_folder} --cores 16 -- \\
  train --wandb --preset mt10-2m --run-name mt10 --resume auto
"""
    )


def test_array_trains_a_seed_per_task_in_one_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", *CARTPOLE, *TIME, "--array", "seeds=1-10%3", "--run-name", "ten"]
    text = dry_run(capsys, *words)
    group = tmp_path / "runs" / "ten"
    assert "#SBATCH --array=1-10%3\n" in text
    assert f"#SBATCH --output={group}/seed-%a/slurm-%A_%a.out\n" in text
    assert text.endswith(
        f'--folder {group}/seed-"$SLURM_ARRAY_TASK_ID" --cores 1 -- \\\n'
        '  train --env CartPole-v1 --timesteps 4096 --runs-dir runs/ten --run-name seed-"$SLURM_ARRAY_TASK_ID" '
        '--seed "$SLURM_ARRAY_TASK_ID" --resume auto\n'
    )


def test_jobs_of_a_sweep_are_its_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["sweep", *CARTPOLE, *TIME, "--trials", "8", "--array", "jobs=4", "--run-name", "s", "--budget", "2h"]
    text = dry_run(capsys, *words)
    sweep = tmp_path / "runs" / "s"
    assert "#SBATCH --array=1-4\n" in text
    assert f"#SBATCH --output={sweep}/slurm-%A_%a.out\n" in text
    assert text.endswith(
        f'--folder {sweep} --cores 1 -- \\\n  sweep --resume {sweep} --worker "$SLURM_ARRAY_TASK_ID" --budget 2h\n'
    )
    assert "--worker" not in dry_run(capsys, *words[:-8], *words[-4:])
    assert list(tmp_path.iterdir()) == []


def test_group_in_one_job_and_population_are_resumed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    group = dry_run(capsys, "train", *CARTPOLE, *TIME, "--seeds", "4")
    assert "--seeds 4 --run-name CartPole-v1-ppo-classic-seeds --resume auto\n" in group
    population = dry_run(capsys, "train", *CARTPOLE, *TIME, "--seeds", "4", "--pbt")
    assert "--seeds 4 --pbt --run-name CartPole-v1-ppo-classic-population\n" in population


def test_bash_reads_the_arguments_as_they_were_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b'c$HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    python = tmp_path / "python of mine"
    python.write_text(PRINT_ARGUMENTS.replace("/usr/bin/env python3", sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(script_module.sys, "executable", str(python))
    monkeypatch.setenv("WANDB_PROJECT", "it's $5")
    odd = ["--env-kwargs", '{x_threshold: 2.0, \'a"b\': "$(exit) `c` \\ !"}', "--run-name", "x;y #z é 50%j"]
    (folder / "own.py").write_text("import gymnasium\ndef make(**kwargs): return gymnasium.make('CartPole-v1')\n")
    text = dry_run(capsys, "train", "own:make", "--timesteps", "64", *odd, *TIME, "--array=seeds=3,7")
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "7"}
    done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    group = folder / "runs" / odd[3]
    supervisor = ["-m", "unidle.slurm", "--folder", f"{group}/seed-7", "--cores", "1", "--"]
    training = ["train", "own:make", "--timesteps", "64", *odd[:2], "--runs-dir", f"runs/{odd[3]}"]
    assert json.loads(done.stdout) == [
        *(str(folder), *supervisor, *training, "--run-name", "seed-7", "--seed", "7", "--resume", "auto")
    ]
    # sbatch reads %% as a percent sign.
    assert '#SBATCH --job-name="x;y #z é 50%j"\n' in text
    assert '50%%j/seed-%a/slurm-%A_%a.out"\n' in text


def test_gpu_of_the_job_need_not_be_on_the_machine_that_submits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--n-envs", "64", "--batch-size", "auto", "--device", "cuda"]
    assert " --device cuda " in dry_run(capsys, "train", *CARTPOLE, *TIME, *words)


def test_gpus_of_the_job_share_its_environments_and_need_not_be_on_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = ["--gpus", "4", "--n-envs-per-gpu", "32", "--batch-size", "4096"]
    assert f" {' '.join(ranks)} --run-name " in dry_run(capsys, "train", *CARTPOLE, *TIME, *ranks)
    assert " --gpus 1 --seeds 2 " in dry_run(capsys, "train", *CARTPOLE, *TIME, "--gpus", "1", "--seeds", "2")


def test_no_flag_of_a_job_is_also_one_of_training() -> None:
    own = {field.name for field in dataclasses.fields(_SlurmFlags)}
    training = {field.name for kind in (TrainFlags, SweepFlags) for field in dataclasses.fields(kind)}
    settings = {name for recipe in RECIPES.values() for name in Config(recipe()).flat()}
    assert own & (training | settings | RENAMED.keys() | ALIASES.keys()) == {"json"}


# -- named jobs --------------------------------------------------------------------------------------------------------


def test_named_jobs_are_listed_with_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["slurm", "--json"]) == 0
    rows = {row["job"]: row for row in json.loads(capsys.readouterr().out)["jobs"]}
    assert list(rows) == ["mt10-20m", "mt10-2m", "mt50"]
    assert (rows["mt10-2m"]["n_envs"], rows["mt10-2m"]["gres"], rows["mt10-2m"]["cores"]) == (32, "gpu:a40:1", 16)
    assert (rows["mt10-20m"]["n_envs"], rows["mt10-20m"]["gres"]) == (48, "gpu:a100:1")
    assert run(["slurm"]) == 0
    printed = capsys.readouterr().out
    assert all(row["time"] in printed and row["description"] in printed for row in rows.values())


@pytest.mark.parametrize("name", job_names())
def test_every_named_job_is_a_valid_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, name)
    assert f"#SBATCH --time={load_job(name).slurm['time']}\n" in text
    assert "#SBATCH --time=9\n" in dry_run(capsys, name, "--time", "9", "--timesteps", "100")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", *CARTPOLE], "A SLURM job needs a time limit; add --time, such as --time 8:00:00."),
        (["train", *CARTPOLE, "--time", "soon"], "--time is 'soon'; write hours:minutes:seconds"),
        (["train", *CARTPOLE, "--time", "0:90"], "A time limit of 120 seconds is too short"),
        (["train", *CARTPOLE, *TIME, "--signal", "0"], "--signal is 0; use the seconds"),
        (["train", *CARTPOLE, *TIME, "--cpus-per-task", "0"], "--cpus-per-task is 0; a job needs at least 1."),
        (["train", *CARTPOLE, *TIME, "--sbatch", "'--a"], "--sbatch has an unclosed quote"),
        (["train", *CARTPOLE, *TIME, "--sbatch", "-x"], "--sbatch has `-x`; write each option as --name"),
        (["train", *CARTPOLE, *TIME, "--array", "1-10"], "--array is '1-10'; use seeds=1-10"),
        (["train", *CARTPOLE, *TIME, "--array", "jobs=3"], "--array jobs is for a sweep"),
        (["train", *CARTPOLE, *TIME, "--array", "seeds=1-3", "--seed", "1"], "--array gives each task its seed"),
        (["train", *CARTPOLE, *TIME, "--array", "seeds=1,1"], "`seeds` lists 1 twice"),
        (["sweep", *CARTPOLE, *TIME, "--array", "seeds=1-3"], "--array seeds is for training"),
        (["train", *CARTPOLE, *TIME, "--n-evns", "3"], "did you mean"),
        (["train", *CARTPOLE, *TIME, "--batch-size", "1000"], "Batch size 1000 does not divide"),
        (["train", *TIME], "environment"),
        (["train", "--resume", "runs/a", *TIME], "submit its script again (sbatch runs/a/slurm.sh)"),
        (["mt10-2m", "--preset", "classic"], "The job mt10-2m has its preset"),
        (["trian", *CARTPOLE, *TIME], "There is no job `trian`; use train, sweep, or one of mt10-20m"),
        ([*CARTPOLE, *TIME], "Say what to run: unidle slurm train"),
        (["train", *CARTPOLE, *TIME, "--array", "jobs=²"], "--array is 'jobs=²'"),
        (["train", *CARTPOLE, *TIME, "--array", "seeds=1-3%²"], "--array is 'seeds=1-3%²'"),
        (["train", *CARTPOLE, *TIME, "--array", "seeds=٣"], "--array is 'seeds=٣'"),
        (["train", *CARTPOLE, "--time", "²"], "--time is '²'"),
        (["train", *CARTPOLE, *TIME, "--n-envs", "²"], "--n-envs"),
        (["train", *CARTPOLE, *TIME, "--gpus", "2", "--ranks", "2"], "--gpus and --ranks both say how many ranks"),
        (["train", *CARTPOLE, *TIME, "--gpus", "0"], "--gpus is 0; it must be at least 1."),
        (["train", *CARTPOLE, *TIME, "--gpus", "2", "--seeds", "4"], "--seeds does not train on several ranks"),
        (["train", *CARTPOLE, *TIME, "--gpus", "2", "--seeds", "4", "--pbt"], "does not train on several ranks"),
        (["train", *CARTPOLE, *TIME, "--ranks", "3"], "which is not divisible by 3 ranks"),
        (
            ["train", *CARTPOLE, *TIME, "--ranks", "2", "--n-envs", "2", "--pin-cores"],
            "--pin-cores cannot be used with several ranks",
        ),
        (["train", *CARTPOLE, *TIME, "--n-envs-per-gpu", "8"], "--n-envs-per-gpu needs the number of ranks"),
        (["mt10-2m", "--gpus", "2"], "Multi-task training (`n_tasks` > 1) does not run on several ranks"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, *words, "--dry-run")
    assert list(Path().iterdir()) == []


def test_missing_sbatch_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "The command sbatch is not on this machine" in error_of(capsys, "train", *CARTPOLE, *TIME)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("5", 300), ("5:30", 360), ("1:00:00", 3600), ("1-2", 93600), ("1-0:30", 88200), ("2-1:00:01", 176460)),
        *(("unlimited", None), ("0", None)),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert seconds_of_limit(text) == seconds


def test_arrays_are_read_as_sbatch_reads_them() -> None:
    assert array_of("seeds=1-3,7,9-10%2").ids == (1, 2, 3, 7, 9, 10)
    assert array_of("jobs=3").given == "1-3"


# -- submitting, with a stand-in for sbatch ---------------------------------------------------------------------------


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets sbatch run a script of bash."""

    def install(body: str) -> None:
        program = tmp_path / "bin" / "sbatch"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return install


def test_submitted_job_has_its_script_in_the_run_folder(sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch("echo '12;cluster'; cp \"$2\" copy.sh")
    expected = dry_run(capsys, "train", *CARTPOLE, *TIME)
    assert run(["slurm", "train", *CARTPOLE, *TIME, "--json"]) == 0
    name = "CartPole-v1-ppo-classic-seed0"
    folder = f"runs/{name}"
    assert json.loads(capsys.readouterr().out) == {
        "job": "12",
        "folder": folder,
        "script": f"{folder}/slurm.sh",
        "output": f"{folder}/slurm-12.out",
    }
    assert Path("copy.sh").read_text() == Path(folder, "slurm.sh").read_text() == expected
    # A run of the same default name gets the next folder; one that is named is refused, unless it is to continue.
    assert f"{name}-2" in dry_run(capsys, "train", *CARTPOLE, *TIME)
    again = ["train", *CARTPOLE, *TIME, "--run-name", name]
    assert f"A job was submitted for {folder} before" in error_of(capsys, *again)
    assert run(["slurm", *again, "--resume", "auto"]) == 0


def test_array_creates_its_group(sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch("echo 12")
    words = ["train", *CARTPOLE, *TIME, "--run-name", "g"]
    assert run(["slurm", *words, "--array", "seeds=4,2"]) == 0
    group = GroupFolder.open(Path("runs/g"))
    assert group.seeds == (4, 2)
    assert all(folder.is_dir() for folder in group.runs)
    assert "runs/g/seed-*/slurm-12_*.out" in capsys.readouterr().out
    assert "There is already a run in runs/g" in error_of(capsys, *words, "--array", "seeds=4,2")
    assert run(["slurm", *words, "--array", "seeds=2,4", "--resume", "auto"]) == 0
    assert "has other seeds (4,2)" in error_of(capsys, *words, "--array", "seeds=2,5", "--resume", "auto")


@pytest.mark.parametrize("kind", ["train", "sweep", "array"])
def test_refused_job_leaves_nothing(kind: str, sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch("echo 'sbatch: error: invalid partition specified: gpu' >&2; echo 'sbatch: error: no' >&2; exit 1")
    words = {"train": ["train"], "sweep": ["sweep"], "array": ["train", "--array", "seeds=1-3"]}[kind]
    printed = error_of(capsys, *words, *CARTPOLE, *TIME)
    assert printed == "unidle: SLURM refused the job: invalid partition specified: gpu.\n"
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize("kind", ["train", "sweep", "array"])
def test_job_that_may_be_accepted_keeps_its_folder(kind: str, sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch("echo 'Welcome to the cluster'")
    words = {"train": ["train"], "sweep": ["sweep"], "array": ["train", "--array", "seeds=1-3"]}[kind]
    printed = error_of(capsys, *words, *CARTPOLE, *TIME, "--run-name", "kept")
    assert "sbatch printed no job id, but 'Welcome to the cluster'" in printed
    assert Path("runs/kept/slurm.sh").is_file()


def test_folder_is_kept_if_ctrl_c_stops_sbatch(sbatch: Any) -> None:
    sbatch("echo 12; kill -INT $PPID; sleep 1")
    with suppress(KeyboardInterrupt):
        assert run(["slurm", "train", *CARTPOLE, *TIME, "--run-name", "kept"]) == 130
    assert Path("runs/kept/slurm.sh").is_file()


def test_sbatch_that_cannot_be_started_is_one_sentence(
    sbatch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch("")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    Path("bin/sbatch").write_text("#!/nowhere\n")
    assert "sbatch cannot be started (No such file or directory)" in error_of(capsys, "train", *CARTPOLE, *TIME)
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("array", "output"), [([], "50%j/slurm-12.out"), (["--array", "seeds=1-3"], "50%j/seed-*/slurm-12_*.out")]
)
def test_shown_output_is_the_path_that_slurm_writes_to(
    array: list[str], output: str, sbatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch("echo 12")
    assert run(["slurm", "train", *CARTPOLE, *TIME, *array, "--run-name", "50%j", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == f"runs/{output}"
