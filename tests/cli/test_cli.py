"""The command line as a user runs it: output, exit codes and files of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_envs import FAULTS
from paths import TESTS
from rich.console import Console

from unidle import __version__ as unidle_version
from unidle.cli import presets as presets_command
from unidle.cli.main import run as run_command
from unidle.config import Config
from unidle.config.fields import owners_of
from unidle.config.settings import RECIPES
from unidle.envs.pool.slot import episode_seed
from unidle.report.terminal.presets import print_presets

PROGRAM = str(Path(sys.executable).with_name("unidle"))
SMALL = shlex.split("--n-envs 2 --n-steps 16 --batch-size 16 --n-epochs 1 --net-arch 8 --eval-episodes 2")
SMALL_PRESETS = ["classic", "fast", "atari", "device", "dqn", "sac", "site-explore", "td3"]
RunInProcess = Callable[..., "subprocess.CompletedProcess[str]"]
CLASSIC = ["--preset", "classic"]
CHOICE = ["train", "--env", "cli_envs:Choice", *CLASSIC, *SMALL]


def process_env(**extra: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **extra}


def run_cli(folder: Path, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program in `folder` and wait for it."""
    return subprocess.run(
        [PROGRAM, *args], cwd=folder, capture_output=True, text=True, timeout=120, **{"env": process_env(), **options}
    )


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


def error_of(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one-line error of a command that failed as intended."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("unidle: ")
    message = result.stderr.removeprefix("unidle: ").strip()
    assert message.endswith((".", "?", ")")), message
    return message


@pytest.fixture
def run_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunInProcess:
    """Like `run_cli(tmp_path, …)`, but in this process, where torch is already loaded: much faster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = run_command(list(args))
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return run


def read_settings(run: Path) -> dict[str, Any]:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    return {**tree["recipe"], **tree["engine"], **tree["run"]}


def logged_steps(run: Path) -> list[int]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "iteration"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run in runs/a."""
    folder = tmp_path_factory.mktemp("trained")
    succeeded(run_cli(folder, *CHOICE, "--timesteps", "64", "--run-name", "a", "--quiet"))
    return folder


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", RECIPES)
@pytest.mark.parametrize("command", ["train", "diagnose", "tune"])
def test_help_lists_only_settings_of_the_algorithm(command: str, algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command([command, "--algo", algo, "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for owner, recipe in RECIPES.items():
        for name in vars(recipe()):
            assert (f"--{name.replace('_', '-')}" in flags) == (algo in owners_of(name)), (owner, name)


def test_help_of_train_fits_on_one_screen_and_begins_with_env(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    flags = [found[1] for line in lines if (found := re.match(r"[^\w-]{0,2}(--[a-z][a-z-]+)", line))]
    assert end.value.code == 0
    assert len(lines) <= 40
    assert flags[:3] == ["--env", "--algo", "--preset"]
    assert {"--timesteps", "--seed", "--n-envs", "--device", "--resume", "--runs-dir", "--eval-every"} <= set(flags)
    assert any("--help-all" in line for line in lines)


@pytest.mark.parametrize("command", ["train", "tune", "diagnose"])
def test_help_all_lists_flags_that_help_leaves_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            run_command([command, flag])
        shown.append(set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)))
    assert shown[0] - shown[1] <= {"--help-all"}
    assert {"--gae-lambda", "--workers", "--site", "--log-info"} <= shown[1] - shown[0]


@pytest.mark.parametrize("name", ["export", "presets", "watch"])
def test_help_command_shows_help_of_another(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for args in (["help", name], [name, "--help"], [name, "--help-all"]):
        with pytest.raises(SystemExit) as end:
            run_command(args)
        assert end.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] != ""


def test_help_and_version_need_no_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help"]) == run_command(["--help"]) == 0
    output = capsys.readouterr().out
    assert output == 2 * output[: len(output) // 2]
    assert run_command(["-V"]) == 0
    assert capsys.readouterr().out.strip() == unidle_version


def test_env_may_come_first(tmp_path: Path, run_in_process: RunInProcess) -> None:
    args = ["--timesteps", "32", "--eval-every", "0", "--run-name", "a", "--quiet"]
    succeeded(run_in_process("train", "cli_envs:Choice", *CLASSIC, *SMALL, *args))
    assert read_settings(tmp_path / "runs/a")["env"] == "cli_envs:Choice"


def test_package_runs_as_module(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "unidle", "--version"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, env=process_env(), timeout=60)
    assert succeeded(done).stdout.strip() == unidle_version


def test_help_is_fast(tmp_path: Path) -> None:
    seconds = []  # CPU time, so that other load does not count
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        help_text = succeeded(run_cli(tmp_path, "--help")).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
    for command in ("train", "eval", "presets", "check-env", "export", "report"):
        assert re.search(rf"^  {command} ", help_text, re.MULTILINE)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["train", "--help"], ["eval", "--help"], ["presets"]])
def test_light_commands_do_not_import_torch(args: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom unidle.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit as end: assert not end.code\n"
        "assert 'unidle.cli.main' in sys.modules and 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_train_help_lists_every_setting(tmp_path: Path) -> None:
    help_text = succeeded(run_cli(tmp_path, "train", "--help-all")).stdout
    flags = set(re.findall(r"--[a-z-]+", help_text))
    assert "None" not in help_text  # users write none
    assert "--workers auto|INT" in help_text
    assert "--target-kl none|FLOAT" in help_text
    missing = {name for name in Config().flat() if f"--{name.replace('_', '-')}" not in flags}
    assert not missing
    assert {"--config", "--resume", "--quiet", "--json"} <= flags


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        (["train", "--resume", "runs/a"], {"run", "step", "best_evaluation", "faults", "checkpoint", "report"}),
        (["eval", "runs/a", "--episodes", "3"], {"run", "episodes", "mean_return", "std_return", "returns"}),
        (["presets"], {"cores", "memory_gb", "presets"}),
        (["doctor"], {"checks", "problems"}),
        (["check-env", "cli_envs:Choice"], {"env", "steps", "episodes", "facts", "remarks"}),
        (["export", "runs/a"], {"path"}),
        (["report", "runs/a"], {"path"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_prints_only_one_object_to_stdout(trained: Path, args: list[str], keys: set[str]) -> None:
    result = succeeded(run_cli(trained, *args, "--json"))
    assert len(result.stdout.splitlines()) == 1
    answer = json.loads(result.stdout)
    assert keys <= answer.keys()
    if "path" in keys:
        assert (trained / answer["path"]).stat().st_size > 0


def test_train_json_describes_run_folder(tmp_path: Path) -> None:
    result = succeeded(run_cli(tmp_path, *CHOICE, "--timesteps", "64", "--run-name", "a", "--json"))
    answer = json.loads(result.stdout)
    assert len(result.stdout.splitlines()) == 1
    assert (answer["run"], answer["step"], answer["timesteps"]) == ("runs/a", 64, 64)
    assert (tmp_path / answer["checkpoint"]).exists()
    assert (tmp_path / answer["report"]).exists()


def test_json_redirects_env_output_to_stderr(run_in_process: RunInProcess) -> None:
    printing_env = ["--env", "cli_envs:PrintingEnv", "--no-subproc", "--timesteps", "32", "--run-name", "a"]
    for args in (["train", *SMALL, *printing_env], ["eval", "runs/a"], ["check-env", "cli_envs:PrintingEnv"]):
        result = succeeded(run_in_process(*args, "--json"))
        assert isinstance(json.loads(result.stdout), dict)
        assert "reset\n" in result.stderr
    assert "reset\n" in succeeded(run_in_process("eval", "runs/a")).stdout


def test_json_keeps_progress_on_stderr(run_in_process: RunInProcess) -> None:
    stderr = succeeded(
        run_in_process("train", "--env", "cli_envs:Choice", *SMALL, "--timesteps", "64", "--json")
    ).stderr
    assert "No --preset given" in stderr
    assert re.search(r"^100 %  step 64 of 64  ", stderr, re.MULTILINE)


@pytest.mark.parametrize("args", [["frobnicate"], ["eval", "nowhere"], ["eval", "nowhere", "--episodes", "x"]])
def test_json_of_usage_error_is_one_object(tmp_path: Path, args: list[str]) -> None:
    result = run_cli(tmp_path, *args, "--json")
    assert json.loads(result.stdout) == {"error": error_of(result)}


# -- usage errors ------------------------------------------------------------------------------------------------------

USAGE_ERRORS = {
    "frobnicate": "There is no command `frobnicate`; choose one of demo, train, sweep, eval, ",
    "tun": "There is no command `tun`; did you mean `tune`?",
    "diagnose --env CartPole-v1 --secs 3": "--secs: there is no setting `secs`; did you mean `seconds`?",
    "diagnose --env CartPole-v1 --seconds abc": "--seconds: 'abc' is not a number; `unidle diagnose --help` lists",
    "train --env CartPole-v1 --nonsense 3": "--nonsense: there is no setting `nonsense`; `unidle train --help-all`",
    "train --env CartPole-v1 --n-envs five": "--n-envs: `n_envs` must be an integer, not 'five'.",
    "train --env CartPole-v1 --preset classic --batch-size 33": "Batch size 33 does not divide n_envs × n_steps =",
    "train --env Nope-v1 --preset classic": "There is no environment `Nope-v1`: ",
    "train --env CartPole-v1 --preset nope": "There is no preset `nope`; choose one of classic, fast, ",
    "train --env CartPole-v1 --config nope.yaml": "There is no file nope.yaml; check the path.",
    "train --resume nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "eval nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
}
MORE_USAGE_ERRORS = {
    "train": "No environment given; add --env, for example --env CartPole-v1.",
    "train CartPole-v1 --env Acrobot-v1": "The environment is given twice, as `CartPole-v1` and with --env; remove one",
    "train --seed 1 CartPole-v1": "Unrecognised arguments `CartPole-v1`; `unidle train --help` lists the options.",
    "train Nope-v1 --preset classic": "There is no environment `Nope-v1`: ",
    "help tun": "There is no command `tun`; did you mean `tune`?",
    "hlep": "There is no command `hlep`; did you mean `help`?",
    "train --env CartPole-v1 --learning_rat 1": "there is no setting `learning_rat`; did you mean `learning_rate`?",
    "train --env CartPole-v1 --num-envs=2.5": "--n-envs: `n_envs` must be an integer, not '2.5'.",
    "train --env CartPole-v1 --activation step": "`activation` must be 'tanh' or 'relu' or ",
    "train --env CartPole-v1 --net-arch 8,x": "`net_arch` must be a list of integers such as 64,64",
    "train --env CartPole-v1 --adam-betas 0.9,x": "`adam_betas` must be a list of numbers such as 0.9,0.999",
    "train --env CartPole-v1 --net-arch 8 8": "Unrecognised arguments `8`; ",
    "train --env CartPole-v1 --env-kwargs '[1]'": "'[1]' is not a mapping such as '{continuous: true}'",
    "train --env CartPole-v1 --preset classic --env-kwargs '{wind: 1}' --quiet": "does not accept these env_kwargs: ",
    "train --env CartPole-v1 --subproc=maybe": "--subproc: 'maybe' is not one of on, off, auto",
    "train --env CartPole-v1 --n-envs": "Missing value for argument '--n-envs'",
    "train --env CartPole-v1 --n-envs 0": "`n_envs` is 0; it must be at least 1.",
    "train --env CartPole-v1 --timesteps 1e6 --target-kl none --seed -1": "`seed` is -1; it must be between 0 and",
    "train --env CartPole-v1 --seed 1e30": "it must be between 0 and 2**63 - 1.",
    "train --env CartPole-v1 --learning-rate inf": "`learning_rate` is inf; it must be a finite number.",
    "train --env CartPole-v1 --no-subproc --workers 8": "--no-subproc steps environments in this process, but",
    "train --env CartPole-v1 --normalize-obs=true": "use --normalize-obs or --no-normalize-obs.",
    "train --env CartPole-v1 --no_normalize_obs yes": "use --normalize-obs or --no-normalize-obs.",
    "train --env CartPole-v1 --pin-cores true": "--pin-cores takes no value, but got `true`; use --pin-cores or",
    "train --env CartPole-v1 --subproc true": "--subproc takes no value, but got `true`; use --subproc or --no-subproc",
    "train --env CartPole-v1 --no-subproc auto": "--subproc takes no value, but got `auto`; use --subproc or",
    "train --env CartPole-v1 --run-name a/b": "use a plain folder name",
    f"train --env CartPole-v1 --run-name {'a' * 300}": "use a plain folder name of at most 255 bytes",
    f"train --env CartPole-v1 --runs-dir {'a' * 300}": "(File name too long); choose another --runs-dir.",
    f"train --resume {'a' * 5000}": "is too long or not UTF-8; rename the run folder.",
    f"train --env CartPole-v1 --env-kwargs '{'[' * 9000}'": "is not a mapping such as",
    "train --env CartPole-v1 --network os:nope": "Module `os` has no callable `nope`; check the name",
    "train --env nowhere:Env": "Module `nowhere` cannot be found; run from its folder, or check the name.",
    "train --env os:getcwd --preset classic --quiet": "os:getcwd returned str, not a gymnasium.Env; ",
    "export nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "sweep --env CartPole-v1 --budget soon": "--budget soon is not a duration; use, for example, 90s, 5m or 1h.",
    "sweep --env CartPole-v1 --trails 3": "--trails: there is no setting `trails`; did you mean `trials`?",
    "sweep --env CartPole-v1 --space nowhere.yaml": "There is no file nowhere.yaml; check the path.",
    "sweep --resume nowhere": "nowhere is not the folder of a sweep: it has no sweep.yaml.",
    f"sweep --resume {'a' * 5000}": "is not the folder of a sweep",
    "report nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "eval": "Missing argument PATH (Run folder, such as runs/my-run)",
    "eval runs/a --seed 1e30": "--seed: '1e30' is not an integer",
    "eval runs/a --episodes many": "--episodes: 'many' is not an integer",
    "eval runs/a --speed 3": "Unrecognised arguments `--speed 3`; `unidle eval --help` lists the options.",
    "check-env Nope-v1": "There is no environment `Nope-v1`: ",
    "export runs/a --format onnx": "Unrecognised arguments `--format onnx`; `unidle export --help` lists the options.",
    "scaling --critic abc": "'abc' is not an integer",
}


@pytest.mark.parametrize("args", USAGE_ERRORS)
def test_usage_error_is_one_line_and_creates_no_files(args: str, tmp_path: Path) -> None:
    assert USAGE_ERRORS[args] in error_of(run_cli(tmp_path, *shlex.split(args)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", MORE_USAGE_ERRORS)
def test_usage_error_in_process_is_one_line_and_creates_no_files(
    args: str, tmp_path: Path, run_in_process: RunInProcess
) -> None:
    assert MORE_USAGE_ERRORS[args] in error_of(run_in_process(*shlex.split(args)))
    assert list(tmp_path.iterdir()) == []


def test_unwritable_report_is_one_line_error(tmp_path: Path, run_in_process: RunInProcess) -> None:
    succeeded(
        run_in_process(
            "train", "--env", "CartPole-v1", *SMALL, *CLASSIC, "--timesteps", "64", "--run-name", "a", "--quiet"
        )
    )
    run = tmp_path / "runs/a"
    for name in (f"report.{os.getpid()}.tmp", "policy.onnx"):
        (run / name).mkdir()
    error = error_of(run_in_process("report", "runs/a"))
    assert "The page cannot be written to runs/a (Is a directory); make the folder writable." in error
    assert "The page cannot be written to / (" in error_of(run_in_process("report", "runs/a", "--html=/"))
    assert "policy.onnx cannot be written (Is a directory); make" in error_of(run_in_process("export", "runs/a"))
    nowhere = error_of(run_in_process("export", "runs/a", "--out", "nowhere/policy.onnx"))
    assert nowhere == "nowhere/policy.onnx cannot be written (No such file or directory); choose another --out."
    assert (
        "The report could not be written"
        in run_in_process("train", "--resume", "runs/a", "--timesteps", "128", "--quiet").stderr
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_check_env_and_train_report_same_env_error(fault: str, tmp_path: Path, run_in_process: RunInProcess) -> None:
    env_flags = ["cli_envs:FaultyEnv", "--env-kwargs", f"{{fault: {fault}}}"]
    assert error_of(run_in_process("check-env", *env_flags)) == FAULTS[fault]
    assert error_of(run_in_process("train", "--env", *env_flags, *SMALL, *CLASSIC, "--quiet")) == FAULTS[fault]
    assert list(tmp_path.iterdir()) == []


def test_invalid_env_exits_with_code_2(tmp_path: Path) -> None:
    env_flags = ["cli_envs:FaultyEnv", "--env-kwargs", "{fault: nan}"]
    commands = (["check-env"], ["train", *CLASSIC, "--quiet", "--env"])
    errors = [error_of(run_cli(tmp_path, *args, *env_flags)) for args in commands]
    assert errors == [FAULTS["nan"]] * 2
    assert list(tmp_path.iterdir()) == []


LATE_NAN = [
    "train",
    *SMALL,
    *CLASSIC,
    "--env",
    "cli_envs:LateNanEnv",
    "--run-name",
    "a",
    "--timesteps",
    "1000",
    "--eval-every",
    "0",
]
SERIAL, WORKERS = ["--no-subproc"], ["--subproc", "--workers", "2"]
backends = pytest.mark.parametrize("backend", [SERIAL, WORKERS], ids=["serial", "workers"])


def logged_faults(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "fault"]


@pytest.mark.parametrize("value", ["observation", "reward"])
@backends
def test_late_nan_is_survived_reported_and_counted(
    value: str, backend: list[str], tmp_path: Path, run_in_process: RunInProcess
) -> None:
    # Environment 1 goes bad after 200 of its steps, in the middle of the run's 13th rollout (steps 384 to 416).
    result = succeeded(run_in_process(*LATE_NAN, *backend, "--env-kwargs", f"{{steps: 200, what: {value}}}", "--json"))
    message = f"Environment 1 returned a NaN or infinite {value} in episode 40 (seed {episode_seed(0, 1, 40)}), step 1."
    assert message in result.stderr.splitlines()
    assert "  faults 1  " in result.stderr
    answer = json.loads(result.stdout)
    assert (answer["step"], answer["faults"]) == (1024, {"exception": 1})
    assert logged_faults(tmp_path / "runs/a") == [
        {"kind": "fault", "step": 416, "env": 1, "fault": "exception", "text": message}
    ]
    assert logged_steps(tmp_path / "runs/a") == list(range(32, 1025, 32))
    assert "1 × exception or NaN" in (tmp_path / "runs/a/report.html").read_text()


@pytest.mark.parametrize("value", ["observation", "reward"])
@backends
def test_fatal_fault_leaves_resumable_checkpoint(
    value: str, backend: list[str], tmp_path: Path, run_in_process: RunInProcess
) -> None:
    options = ["--checkpoint-every", "320", "--env-kwargs", f"{{steps: 200, what: {value}}}"]
    result = run_in_process(*LATE_NAN, *options, *backend, "--max-env-restarts", "0", "--quiet", "--json")
    assert result.returncode == 1
    warning, error = result.stderr.rstrip("\n").split("unidle: ", 1)
    assert json.loads(result.stdout) == {"error": error}
    summary, fault, hint = error.splitlines()
    assert warning.rstrip("\n") == fault  # reported when it happened, and again as the reason for the end
    assert hint == "Fix it, then resume with: unidle train --resume runs/a"
    assert summary.startswith("Environment 1 failed ")
    assert "max_env_restarts allows 0." in summary
    assert fault.startswith(f"Environment 1 returned a NaN or infinite {value} in episode 40 (seed ")
    kept = sorted(path.name for path in (tmp_path / "runs/a/checkpoints").iterdir())
    assert kept == ["step-000000000320.pt", "step-000000000384.pt"]  # the periodic one, and the last step
    assert "384" in (tmp_path / "runs/a/report.html").read_text()
    answer = json.loads(succeeded(run_in_process("eval", "runs/a", "--episodes", "2", "--json")).stdout)
    assert answer["step"] == 384
    assert all(0 <= value <= 5 for value in answer["returns"])
    succeeded(run_in_process("train", "--resume", "runs/a", "--max-env-restarts", "10", "--quiet"))
    assert logged_steps(tmp_path / "runs/a") == list(range(32, 1025, 32))


def test_exit_code_is_1_for_failed_run_and_0_for_survived_fault(tmp_path: Path) -> None:
    failed = run_cli(tmp_path, *LATE_NAN, "--max-env-restarts", "0", "--quiet")
    assert failed.returncode == 1
    assert "\nunidle: Environment 1 failed " in failed.stderr
    assert "Environment 1 returned a NaN or infinite observation in episode 40" in failed.stderr
    assert "Traceback" not in failed.stderr
    survived = succeeded(run_cli(tmp_path, *LATE_NAN, "--quiet", "--run-name", "b"))
    assert survived.stderr.startswith("Environment 1 returned a NaN or infinite observation in episode 40")
    assert survived.stdout == ""


@pytest.mark.parametrize("command", ["train", "diagnose"])
def test_out_of_gpu_memory_error_suggests_fix(command: str, tmp_path: Path) -> None:
    job = ["--env", "cli_envs:Choice", *CLASSIC, *SMALL, "--network", "custom_networks:OutOfMemoryNetwork"]
    result = run_cli(tmp_path, command, *job, *(["--seconds", "1"] if command == "diagnose" else []))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("unidle: The GPU ran out of memory while allocating 2.00 GiB; stop other programs on it")
    assert "fewer --n-envs" in last


@backends
def test_repeated_env_traceback_is_shown_once(backend: list[str], tmp_path: Path, run_in_process: RunInProcess) -> None:
    raising = ["train", *SMALL, *CLASSIC, "--env", "cli_envs:RaisingEnv", "--timesteps", "640", "--run-name", "a"]
    result = succeeded(run_in_process(*raising, *backend))
    stderr = result.stderr
    faults = logged_faults(tmp_path / "runs/a")
    assert len(faults) > 5
    assert stderr.count("  Traceback (most recent call last):\n") == 1
    assert stderr.count("  ConnectionError: the simulator does not answer\n") == 1
    assert all("Traceback" in fault["text"] for fault in faults)  # the file has every traceback
    shown = re.findall(r"^Environment \d+ failed in episode .*: ConnectionError: the simulator", stderr, re.MULTILINE)
    suppressed = re.findall(r"(?:^| \()(\d+) similar messages not shown", stderr, re.MULTILINE)
    assert len(shown) < len(faults) == len(shown) + sum(map(int, suppressed))
    assert re.search(
        rf"^faults +{len(faults)} × exception or NaN; .* runs/a/metrics.jsonl for details$", result.stdout, re.MULTILINE
    )


# -- settings --------------------------------------------------------------------------------------------------------


def test_every_flag_spelling_reaches_config(tmp_path: Path, run_in_process: RunInProcess) -> None:
    flags = "--num_envs 2 --n_steps=8 --batch-size auto --net-arch 8,8 --no-subproc --n-epochs 1 --target-kl none"
    flags += " --workers auto --slices none --checkpoint-every=auto"
    more_flags = (
        "--total-timesteps 1.6e1 --eval-every 0 --no-tensorboard --normalize-obs --target-return none --run-name a"
    )
    options = ["--env-kwargs", "{answer: 1}", "--preset", "classic", "--quiet", "--no-pin-cores"]
    succeeded(run_in_process("train", "--env", "cli_envs:Choice", *options, *flags.split(), *more_flags.split()))
    settings = read_settings(tmp_path / "runs/a")
    expected = {
        "n_envs": 2,
        "n_steps": 8,
        "batch_size": 16,  # the largest divisor of 16, at most classic's 64
        "net_arch": [8, 8],
        "subproc": False,
        "pin_cores": False,
        "target_kl": None,
        "timesteps": 16,
        "tensorboard": False,
        "normalize_obs": True,
        "env_kwargs": {"answer": 1},
        "preset": "classic",
    }
    assert {name: settings[name] for name in expected} == expected
    assert not (tmp_path / "runs/a/tensorboard").exists()


@pytest.mark.parametrize("args", ["--subproc auto --pin_cores none", "--subproc=none --pin-cores=auto"])
def test_switch_accepts_auto_and_none(args: str, tmp_path: Path, run_in_process: RunInProcess) -> None:
    (tmp_path / "a.yaml").write_text("subproc: false\npin_cores: true\n")
    succeeded(
        run_in_process(*CHOICE, "--config", "a.yaml", *args.split(), "--timesteps", "32", "--quiet", "--run-name", "a")
    )
    settings = read_settings(tmp_path / "runs/a")
    assert settings["subproc"] is settings["pin_cores"] is None


@pytest.mark.parametrize("flag", [["--num_envs", "4"], ["--num-envs=4"], ["--n_envs", "4"], ["--n-envs=4"]])
def test_num_envs_is_alias_of_n_envs(flag: list[str], tmp_path: Path, run_in_process: RunInProcess) -> None:
    args = ["--n-steps", "4", "--batch-size", "4", "--timesteps", "1", "--eval-every", "0", "--run-name", "a"]
    succeeded(run_in_process("train", "--env", "cli_envs:Choice", *args, *flag, "--quiet"))
    assert read_settings(tmp_path / "runs/a")["n_envs"] == 4


def test_auto_batch_size_is_largest_divisor_up_to_presets(tmp_path: Path, run_in_process: RunInProcess) -> None:
    args = ["--n-envs", "3", "--n-steps", "70", "--n-epochs", "1", "--timesteps", "1", "--eval-every", "0"]
    for preset in ("classic", "fast"):
        succeeded(
            run_in_process(
                "train",
                "--env",
                "cli_envs:Choice",
                *args,
                "--preset",
                preset,
                "--run-name",
                preset,
                "--quiet",
                "--batch-size",
                "auto",
                "--net-arch",
                "8",
            )
        )
    assert read_settings(tmp_path / "runs/classic")["batch_size"] == 42  # of 210, at most 64
    assert read_settings(tmp_path / "runs/fast")["batch_size"] == 210  # at most 2048


def test_flag_overrides_file_and_file_overrides_preset(tmp_path: Path, run_in_process: RunInProcess) -> None:
    (tmp_path / "mine.yaml").write_text("n_steps: 8\nbatch_size: 8\ngamma: 0.9\nnet_arch: [8]\neval_every: 0\n")
    args = ["--preset", "fast", "--config", "mine.yaml", "--gamma", "0.5", "--timesteps", "1", "--n-epochs", "2"]
    succeeded(run_in_process("train", "--env", "cli_envs:Choice", *args, "--run-name", "a", "--quiet"))
    settings = read_settings(tmp_path / "runs/a")
    assert settings["preset"] == "fast"
    assert settings["n_envs"] == 16  # from the preset
    assert settings["n_steps"] == 8  # from the file; the preset has 256
    assert settings["gamma"] == 0.5  # from the flag; the file has 0.9
    assert settings["n_epochs"] == 2  # from the flag; the preset has 15


def test_config_file_of_run_reproduces_the_run(tmp_path: Path, run_in_process: RunInProcess) -> None:
    succeeded(
        run_in_process(*CHOICE, "--timesteps", "96", "--seed", "3", "--gamma", "0.9", "--run-name", "a", "--quiet")
    )
    succeeded(run_in_process("train", "--config", "runs/a/config.yaml", "--run-name", "b", "--quiet"))
    metrics = [
        [
            (key, value)
            for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
            for key, value in json.loads(line).items()
            if key.startswith(("train/", "eval/")) and key != "eval/seconds_behind"
        ]
        for name in ("a", "b")
    ]
    assert len(metrics[0]) > 20
    assert metrics[0] == metrics[1]


def test_subproc_flag_chooses_process_of_envs(run_in_process: RunInProcess) -> None:
    run = [*CHOICE, "--timesteps", "1", "--eval-every", "0"]
    in_workers = succeeded(run_in_process(*run, "--subproc", "--workers", "2")).stderr
    assert re.search(r"2 worker processes \(\S+ [µm]s per step", in_workers)
    assert re.search(r"in this process \(\S+ [µm]s per step", succeeded(run_in_process(*run, "--no-subproc")).stderr)


def test_env_and_network_are_found_in_current_folder(tmp_path: Path) -> None:
    (tmp_path / "local_env.py").write_text("import cli_envs\ndef make(): return cli_envs.Choice()\n")
    (tmp_path / "local_network.py").write_text(
        "import torch\ndef make(observation_space, action_space): return torch.nn.Linear(2, 5)\n"
    )
    args = [
        "train",
        "--env",
        "local_env:make",
        "--network",
        "local_network:make",
        *SMALL,
        "--timesteps",
        "32",
        "--subproc",
    ]
    succeeded(run_cli(tmp_path, *args, "--eval-every", "0", "--run-name", "a", "--quiet"))
    assert "mean return" in succeeded(run_cli(tmp_path, "eval", "runs/a", "--episodes", "2")).stdout


def test_discretize_splits_continuous_action_into_bins(tmp_path: Path, run_in_process: RunInProcess) -> None:
    from unidle.api import load

    pendulum = ["train", "--env", "Pendulum-v1", *SMALL, "--timesteps", "32", "--eval-every", "0", "--quiet"]
    succeeded(run_in_process(*pendulum, "--discretize", "3", "--run-name", "a"))
    run = load(tmp_path / "runs/a")
    assert run.agent.action_layout.nvec == (3,)
    observation = run.agent.obs_layout.space.sample()
    actions = {float(run.predict(observation, deterministic=False)[0][0]) for _ in range(100)}
    assert actions == {-2.0, 0.0, 2.0}


def test_piped_output_is_plain_lines(tmp_path: Path) -> None:
    result = succeeded(
        run_cli(tmp_path, *CHOICE, "--timesteps", "64", "--run-name", "a", env=process_env(FORCE_COLOR="1"))
    )
    assert "\x1b[2K" not in result.stderr  # escape code of the live display
    assert re.search(r"^100 %  step 64 of 64  ", result.stderr, re.MULTILINE)
    assert re.search(r"^evaluation .* over 2 episodes", result.stderr, re.MULTILINE)
    assert "runs/a/checkpoints/best.pt" in result.stdout


def test_quiet_prints_no_progress_and_no_summary(run_in_process: RunInProcess) -> None:
    result = succeeded(run_in_process(*CHOICE, "--timesteps", "64", "--quiet"))
    assert result.stdout + result.stderr == ""


def test_quiet_still_reports_ignored_settings(tmp_path: Path, run_in_process: RunInProcess) -> None:
    (tmp_path / "theirs.yaml").write_text("policy: MlpPolicy\nn_timesteps: 64\ndevice: mps\n")
    args = ["--config", "theirs.yaml", "--env", "cli_envs:Choice", *SMALL]
    result = succeeded(run_in_process("train", *args, "--quiet"))
    assert result.stdout == ""
    assert "`device: mps` is not supported and is ignored" in result.stderr
    assert " % " not in result.stderr


# -- run names and resume ----------------------------------------------------------------------------------------------


def test_existing_run_name_is_rejected(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (trained / "runs/a").rglob("*")}
    message = error_of(run_cli(trained, *CHOICE, "--run-name", "a", "--quiet"))
    assert (
        message
        == "There is already a run in runs/a; choose another --run-name, or resume it: unidle train --resume runs/a."
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_unnamed_runs_get_unique_names(tmp_path: Path, run_in_process: RunInProcess) -> None:
    for _ in range(2):
        succeeded(run_in_process(*CHOICE, "--timesteps", "1", "--eval-every", "0", "--quiet"))
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["cli_envs-Choice-ppo-classic-seed0", "cli_envs-Choice-ppo-classic-seed0-2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--gamma 0.5", "A resumed run keeps its recipe, but gamma would change it; remove it,"),
        ("--n-envs 4 --gamma 0.5", "A resumed run keeps its recipe, but n_envs, gamma would change it"),
        ("--n-steps 4", "A resumed run keeps its recipe, but n_steps would change it"),
        ("--batch-size auto", "A resumed run keeps its recipe, but batch_size would change it"),
        ("--run-name b", "A resumed run stays in runs/a; remove run_name and runs_dir, or start a new run."),
        ("--runs-dir elsewhere", "A resumed run stays in runs/a; remove run_name and runs_dir, or start a new run."),
        ("--seed 3", "A resumed run keeps its recipe, but seed would change it"),
        ("--env CartPole-v1", "A resumed run keeps its env; remove --env, or start a new run."),
        ("--network mine:network", "A resumed run keeps its network; remove --network, or start a new run."),
        ("--preset fast", "--resume uses the settings of the run; remove --config and --preset."),
        (
            "--config runs/a/config.yaml",
            "--resume uses the settings of the run; remove --config and --preset.",
        ),
    ],
)
def test_resume_rejects_recipe_changes(
    args: str, message: str, trained: Path, run_in_process: RunInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = (trained / "runs/a/config.yaml").read_text()
    assert message in error_of(run_in_process("train", "--resume", "runs/a", *args.split()))
    assert (trained / "runs/a/config.yaml").read_text() == before


def test_resume_with_more_timesteps_continues(trained: Path) -> None:
    shutil.copytree(trained / "runs/a", trained / "runs/longer")
    args = [
        "--resume",
        "runs/longer",
        "--timesteps",
        "160",
        "--learning-rate",
        "3e-4",
        "--subproc",
    ]  # 3e-4 is no change
    answer = json.loads(succeeded(run_cli(trained, "train", *args, "--json")).stdout)
    assert answer["step"] == 160
    assert logged_steps(trained / "runs/longer") == [32, 64, 96, 128, 160]
    assert read_settings(trained / "runs/longer")["timesteps"] == 160
    assert logged_steps(trained / "runs/a") == [32, 64]


# -- stopping --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def start_cli(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The running program, in its own process group as under a shell."""
    process = subprocess.Popen(
        [PROGRAM, *args],
        cwd=folder,
        env=process_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_gone(pid: int) -> bool:
    """Whether the process has exited; it may still be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def train_and_signal(folder: Path, signum: int, send: Callable[[int, int], None]) -> subprocess.Popen[str]:
    """Train endlessly with two workers, send the signal during training and wait for the exit."""
    endless = ["--timesteps", "100000000", "--eval-every", "0", "--run-name", "a", "--subproc", "--workers", "2"]
    with start_cli(folder, *CHOICE, *endless) as process:
        metrics = folder / "runs/a/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        workers = children_of(process.pid)
        assert len(workers) == 2
        send(process.pid, signum)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, stderr
    assert "Stopping after this iteration and saving" in stderr
    assert "exited unexpectedly" not in stderr
    wait_for(lambda: all(map(is_gone, workers)), 5)
    return process


def assert_saved_and_resumable(folder: Path) -> None:
    steps = logged_steps(folder / "runs/a")
    assert (folder / f"runs/a/checkpoints/step-{steps[-1]:012d}.pt").exists()
    assert (folder / "runs/a/report.html").exists()
    succeeded(run_cli(folder, "train", "--resume", "runs/a", "--timesteps", str(steps[-1] + 64), "--quiet"))
    assert logged_steps(folder / "runs/a") == [*steps, steps[-1] + 32, steps[-1] + 64]


def test_ctrl_c_saves_a_resumable_run(tmp_path: Path) -> None:
    train_and_signal(tmp_path, signal.SIGINT, os.killpg)  # to the workers too, as a terminal does
    assert_saved_and_resumable(tmp_path)


def test_sigterm_saves_a_resumable_run(tmp_path: Path) -> None:
    train_and_signal(tmp_path, signal.SIGTERM, os.kill)
    assert_saved_and_resumable(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signal_to_process_group_stops_cleanly(signum: int, tmp_path: Path) -> None:
    train_and_signal(tmp_path, signum, os.killpg)  # as timeout, a closed terminal and SLURM do


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background job"])
def test_second_ctrl_c_stops_immediately(background: bool, tmp_path: Path) -> None:
    slow = ["--env-kwargs", "{pause: 0.05}", "--n-steps", "1024", "--no-subproc", "--run-name", "a"]  # 100 s a rollout
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    try:
        running = start_cli(tmp_path, *CHOICE, *slow)  # inherits the ignored SIGINT
        process = running.__enter__()
    finally:
        signal.signal(signal.SIGINT, handler)
    with contextlib.ExitStack() as ending:
        ending.push(running.__exit__)
        assert process.stderr is not None
        wait_for((tmp_path / "runs/a/checkpoints/step-000000000000.pt").exists)
        time.sleep(0.2)  # environments are stepping by now
        process.send_signal(signal.SIGINT)
        assert any("Ctrl-C again: stop immediately" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert stderr.splitlines()[-1] == "unidle: Stopped immediately; the last checkpoint is kept."
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("episodes", "end"), [(0, "before it finished."), (20, "immediately; the last checkpoint is kept.")]
)
def test_ctrl_c_names_a_checkpoint_only_if_there_is_one(
    episodes: int, end: str, tmp_path: Path, run_in_process: RunInProcess
) -> None:
    options = ["--no-subproc", "--eval-every", "0", "--env-kwargs", f"{{episodes: {episodes}}}", "--run-name", "a"]
    result = run_in_process("train", "cli_envs:Interrupting", *CLASSIC, *SMALL, *options, "--timesteps", "2000")
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr.splitlines()[-1] == f"unidle: Stopped {end}"
    assert (tmp_path / "runs/a/checkpoints").exists() == ("checkpoint" in end)


# -- presets ---------------------------------------------------------------------------------------------------------


LARGE = ["device", "dqn", "isaac", "max-gpu"]
META_WORLD = ["mt10-20m", "mt10-2m", "mt10-paper-1024", "mt10-paper-400", "mt50-paper-1024"]


@pytest.mark.parametrize(
    ("cores", "fits", "instead"),
    [
        (1, ["classic", "atari", "device", "dqn", "sac", "site-explore", "td3"], "classic"),
        (4, SMALL_PRESETS, "fast"),
        (8, ["classic", "fast", "heavy", "atari", "device", "dqn", "max-gpu", "sac", "site-explore", "td3"], "heavy"),
        (
            16,
            [
                "classic",
                "fast",
                "heavy",
                "beast",
                "atari",
                "atari-fast",
                *LARGE,
                *META_WORLD,
                "sac",
                "site-explore",
                "td3",
            ],
            "beast",
        ),
    ],
)
def test_presets_table_shows_fit_and_alternative(
    cores: int, fits: list[str], instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: cores)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 64 * 2**30)
    assert run_command(["presets"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    rows = [line.split(maxsplit=1) for line in table.splitlines()[1:]]
    assert [name for name, row in rows if row.rstrip().endswith("  fits")] == fits
    for name, row in rows:
        if name not in fits:  # presets with fixed sizes have no alternative
            other = "atari" if name == "atari-fast" else instead
            assert row.rstrip().endswith("  too small" if name in META_WORLD else f"  too small, use {other}")
    assert f"This machine: {cores} {'core' if cores == 1 else 'cores'}, 64 GB of memory. `heavy` is" in rest


def test_presets_table_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"preset": name, "n_envs": 256, "n_steps": 4096, "total_batch": 1_048_576, "batch_size": 32_768, "n_epochs": 30}
        | {"network": [1024, 1024, 512, 256], "cores": 16, "memory_gb": 7.2, "fits": name == "fast"}
        | {"instead": "classic", "measured": "125,000 steps/s, GPU 42 %: one H200, 16 cores", "description": "large"}
        for name in ("fast", "mt10-paper-1024")
    ]
    print_presets(Console(width=80), rows, 16, 64 * 2**30)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[-6:] for line in lines[1:3]] == [
        ["×", "4096", "32,768", "1024,1024,512,256", "16", "fits"],
        ["4096", "32,768", "1024,1024,512,256", "16", "use", "classic"],
    ]


def test_presets_that_need_more_memory_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: 64)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 2 * 2**30)
    assert run_command(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["presets"]
    assert [row["preset"] for row in rows if row["fits"]] == [
        "classic",
        "fast",
        "atari",
        "device",
        "dqn",
        "sac",
        "site-explore",
        "td3",
    ]
    others = [row for row in rows if not row["fits"] and row["preset"] not in META_WORLD]
    assert {row["instead"] for row in others if row["preset"] != "atari-fast"} == {"fast"}
    assert {row["instead"] for row in rows if row["fits"]} == {None}


def test_presets_table_has_no_alternative_if_none_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: 1)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 2**29)
    assert run_command(["presets"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert all(line.rstrip().endswith("  too small") for line in table.splitlines()[1:])
    assert "This machine: 1 core, 0.5 GB of memory. Even `classic` may run out of memory." in rest


def test_presets_count_only_granted_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    granted = [
        {"env": process_env(SLURM_CPUS_PER_TASK="1")},
        {"preexec_fn": lambda: os.sched_setaffinity(0, {core})},
    ]
    for options in granted:
        assert "This machine: 1 core, " in succeeded(run_cli(tmp_path, "presets", **options)).stdout
