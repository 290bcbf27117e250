"""The command line as a user meets it: real processes, their output, exit codes and files."""

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

from unidle import __version__ as unidle_version
from unidle.cli import presets as presets_command
from unidle.cli.main import run as run_here
from unidle.config import Config
from unidle.config.fields import owners_of
from unidle.config.settings import RECIPES
from unidle.envs.pool.slot import episode_seed

PROGRAM = str(Path(sys.executable).with_name("unidle"))
SMALL = shlex.split("--n-envs 2 --n-steps 16 --batch-size 16 --n-epochs 1 --net-arch 8 --eval-episodes 2")
SMALL_PRESETS = ["classic", "fast", "device", "dqn", "sac", "site-explore", "td3"]
Here = Callable[..., "subprocess.CompletedProcess[str]"]
CLASSIC = ["--preset", "classic"]
CHOICE = ["train", "--env", "cli_envs:Choice", *CLASSIC, *SMALL]


def environment(**extra: str) -> dict[str, str]:
    places = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **extra}


def unidle(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program in `folder` to its end."""
    return subprocess.run(
        [PROGRAM, *words], cwd=folder, capture_output=True, text=True, timeout=120, **{"env": environment(), **options}
    )


def sound(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


def complaint(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one sentence of a command that failed in order."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("unidle: ")
    sentence = result.stderr.removeprefix("unidle: ").strip()
    assert sentence.endswith((".", "?", ")")), sentence
    return sentence


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """As `unidle(tmp_path, …)`, but in this process, which has loaded torch already: for what needs no real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = run_here(list(words))
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


def settings_of(run: Path) -> dict[str, Any]:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    return {**tree["recipe"], **tree["engine"], **tree["run"]}


def steps_of(run: Path) -> list[int]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "iteration"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run in runs/a."""
    folder = tmp_path_factory.mktemp("trained")
    sound(unidle(folder, *CHOICE, "--timesteps", "64", "--run-name", "a", "--quiet"))
    return folder


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", RECIPES)
@pytest.mark.parametrize("command", ["train", "diagnose", "tune"])
def test_help_shows_the_settings_of_the_algorithm_and_of_no_other(
    command: str, algo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_here([command, "--algo", algo, "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for owner, recipe in RECIPES.items():
        for name in vars(recipe()):
            assert (f"--{name.replace('_', '-')}" in flags) == (algo in owners_of(name)), (owner, name)


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "unidle", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=60)
    assert sound(done).stdout.strip() == unidle_version


def test_help_answers_at_once(tmp_path: Path) -> None:
    seconds = []  # of a core: others that are busy don't make it more
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        help_text = sound(unidle(tmp_path, "--help")).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
    for command in ("train", "eval", "presets", "check-env", "export", "report"):
        assert re.search(rf"^  {command} ", help_text, re.MULTILINE)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["eval", "--help"], ["presets"]])
def test_what_needs_no_torch_does_not_import_it(words: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom unidle.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit as end: assert not end.code\n"
        "assert 'unidle.cli.main' in sys.modules and 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_help_of_train_lists_every_setting(tmp_path: Path) -> None:
    help_text = sound(unidle(tmp_path, "train", "--help")).stdout
    flags = set(re.findall(r"--[a-z-]+", help_text))
    assert "None" not in help_text  # a user types none
    assert "--workers auto|INT" in help_text
    assert "--target-kl none|FLOAT" in help_text
    missing = {name for name in Config().flat() if f"--{name.replace('_', '-')}" not in flags}
    assert not missing
    assert {"--config", "--resume", "--quiet", "--json"} <= flags


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["train", "--resume", "runs/a"], {"run", "step", "best_evaluation", "faults", "checkpoint", "report"}),
        (["eval", "runs/a", "--episodes", "3"], {"run", "episodes", "mean_return", "std_return", "returns"}),
        (["presets"], {"cores", "memory_gb", "presets"}),
        (["check-env", "cli_envs:Choice"], {"env", "steps", "episodes", "facts", "remarks"}),
        (["export", "runs/a", "--onnx"], {"path"}),
        (["report", "runs/a"], {"path"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_one_object_on_stdout_and_nothing_else(trained: Path, words: list[str], keys: set[str]) -> None:
    result = sound(unidle(trained, *words, "--json"))
    assert len(result.stdout.splitlines()) == 1
    answer = json.loads(result.stdout)
    assert keys <= answer.keys()
    if "path" in keys:
        assert (trained / answer["path"]).stat().st_size > 0


def test_json_of_train_tells_what_the_run_folder_holds(tmp_path: Path) -> None:
    result = sound(unidle(tmp_path, *CHOICE, "--timesteps", "64", "--run-name", "a", "--json"))
    answer = json.loads(result.stdout)
    assert len(result.stdout.splitlines()) == 1
    assert (answer["run"], answer["step"], answer["timesteps"]) == ("runs/a", 64, 64)
    assert (tmp_path / answer["checkpoint"]).exists()
    assert (tmp_path / answer["report"]).exists()


def test_json_is_alone_on_stdout_even_if_the_environment_prints(here: Here) -> None:
    chatty = ["--env", "cli_envs:Chatty", "--no-subproc", "--timesteps", "32", "--run-name", "a"]
    for words in (["train", *SMALL, *chatty], ["eval", "runs/a"], ["check-env", "cli_envs:Chatty"]):
        result = sound(here(*words, "--json"))
        assert isinstance(json.loads(result.stdout), dict)
        assert "reset\n" in result.stderr
    assert "reset\n" in sound(here("eval", "runs/a")).stdout


def test_json_does_not_silence_progress_and_notes(here: Here) -> None:
    said = sound(here("train", "--env", "cli_envs:Choice", *SMALL, "--timesteps", "64", "--json")).stderr
    assert "No --preset given" in said
    assert re.search(r"^100 %  step 64 of 64  ", said, re.MULTILINE)


@pytest.mark.parametrize("words", [["frobnicate"], ["eval", "nowhere"], ["eval", "nowhere", "--episodes", "x"]])
def test_json_of_a_mistake_is_one_object_with_the_sentence(tmp_path: Path, words: list[str]) -> None:
    result = unidle(tmp_path, *words, "--json")
    assert json.loads(result.stdout) == {"error": complaint(result)}


# -- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "frobnicate": "There is no command `frobnicate`; choose one of train, eval, ",
    "tun": "There is no command `tun`; did you mean `tune`?",
    "diagnose --env CartPole-v1 --secs 3": "--secs: there is no setting `secs`; did you mean `seconds`?",
    "diagnose --env CartPole-v1 --seconds abc": "--seconds: 'abc' is not a number; `unidle diagnose --help` lists",
    "train --env CartPole-v1 --bogus 3": "--bogus: there is no setting `bogus`; `unidle train --help` lists them all.",
    "train --env CartPole-v1 --n-envs five": "--n-envs: `n_envs` must be an integer, not 'five'.",
    "train --env CartPole-v1 --preset classic --batch-size 33": "Batch size 33 does not divide n_envs × n_steps =",
    "train --env Nope-v1 --preset classic": "There is no environment `Nope-v1`: ",
    "train --env CartPole-v1 --preset nope": "There is no preset `nope`; choose one of classic, fast, ",
    "train --env CartPole-v1 --config nope.yaml": "There is no file nope.yaml; check the path.",
    "train --resume nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "eval nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
}
MORE_MISTAKES = {
    "train": "No environment given; add --env, for example --env CartPole-v1.",
    "train CartPole-v1": "Unrecognised arguments `CartPole-v1`; `unidle train --help` lists the options.",
    "train --env CartPole-v1 --learning_rat 1": "there is no setting `learning_rat`; did you mean `learning_rate`?",
    "train --env CartPole-v1 --num-envs=2.5": "--n-envs: `n_envs` must be an integer, not '2.5'.",
    "train --env CartPole-v1 --activation step": "`activation` must be 'tanh' or 'relu' or ",
    "train --env CartPole-v1 --net-arch 8,x": "`net_arch` must be a list of integers such as 64,64",
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
    "train --env CartPole-v1 --network os:nope": "Module `os` has no callable `nope`; check the name",
    "train --env nowhere:Env": "Module `nowhere` cannot be found; run from its folder, or check the name.",
    "train --env os:getcwd --preset classic --quiet": "os:getcwd returned str, not a gymnasium.Env; ",
    "export nowhere --onnx": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "report nowhere": "nowhere is not a run folder (it has no config.yaml); give a run folder, such",
    "eval": "Missing from unidle eval: PATH Run folder, such as runs/my-run",
    "eval runs/a --seed 1e30": "--seed: '1e30' is not an integer",
    "eval runs/a --episodes many": "--episodes: 'many' is not an integer",
    "eval runs/a --speed 3": "Unrecognised arguments `--speed 3`; `unidle eval --help` lists the options.",
    "check-env Nope-v1": "There is no environment `Nope-v1`: ",
    "export runs/a": "No export format given; add --onnx.",
    "scaling --critic abc": "'abc' is not an integer",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence_and_leaves_nothing_behind(words: str, tmp_path: Path) -> None:
    assert MISTAKES[words] in complaint(unidle(tmp_path, *shlex.split(words)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", MORE_MISTAKES)
def test_so_do_many_more(words: str, tmp_path: Path, here: Here) -> None:
    assert MORE_MISTAKES[words] in complaint(here(*shlex.split(words)))
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_gets_one_sentence(tmp_path: Path, here: Here) -> None:
    sound(here("train", "--env", "CartPole-v1", *SMALL, *CLASSIC, "--timesteps", "64", "--run-name", "a", "--quiet"))
    run = tmp_path / "runs/a"
    for name in ("report.html.tmp", "policy.onnx"):
        (run / name).mkdir()
    said = complaint(here("report", "runs/a"))
    assert "The page cannot be written to runs/a (Is a directory); make the folder writable." in said
    assert "The page cannot be written to / (" in complaint(here("report", "runs/a", "--html=/"))
    assert "policy.onnx cannot be written (Is a directory); make" in complaint(here("export", "runs/a", "--onnx"))
    assert (
        "The report could not be written" in here("train", "--resume", "runs/a", "--timesteps", "128", "--quiet").stderr
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_check_env_and_train_say_the_same_of_a_bad_environment_before_training(
    fault: str, tmp_path: Path, here: Here
) -> None:
    which = ["cli_envs:Faulty", "--env-kwargs", f"{{fault: {fault}}}"]
    assert complaint(here("check-env", *which)) == FAULTS[fault]
    assert complaint(here("train", "--env", *which, *SMALL, *CLASSIC, "--quiet")) == FAULTS[fault]
    assert list(tmp_path.iterdir()) == []


def test_a_bad_environment_ends_both_commands_with_exit_code_2(tmp_path: Path) -> None:
    which = ["cli_envs:Faulty", "--env-kwargs", "{fault: nan}"]
    commands = (["check-env"], ["train", *CLASSIC, "--quiet", "--env"])
    said = [complaint(unidle(tmp_path, *words, *which)) for words in commands]
    assert said == [FAULTS["nan"]] * 2
    assert list(tmp_path.iterdir()) == []


LATE = [
    "train",
    *SMALL,
    *CLASSIC,
    "--env",
    "cli_envs:Late",
    "--run-name",
    "a",
    "--timesteps",
    "1000",
    "--eval-every",
    "0",
]
SERIAL, WORKERS = ["--no-subproc"], ["--subproc", "--workers", "2"]
backends = pytest.mark.parametrize("backend", [SERIAL, WORKERS], ids=["serial", "workers"])


def faults_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "fault"]


@pytest.mark.parametrize("what", ["observation", "reward"])
@backends
def test_a_nan_that_comes_late_is_survived_told_and_counted(
    what: str, backend: list[str], tmp_path: Path, here: Here
) -> None:
    # Environment 1 goes bad after 200 of its steps, in the middle of the run's 13th rollout (steps 384 to 416).
    result = sound(here(*LATE, *backend, "--env-kwargs", f"{{steps: 200, what: {what}}}", "--json"))
    sentence = f"Environment 1 returned a NaN or infinite {what} in episode 40 (seed {episode_seed(0, 1, 40)}), step 1."
    assert sentence in result.stderr.splitlines()
    assert "  faults 1  " in result.stderr
    answer = json.loads(result.stdout)
    assert (answer["step"], answer["faults"]) == (1024, {"exception": 1})
    assert faults_of(tmp_path / "runs/a") == [
        {"kind": "fault", "step": 416, "env": 1, "fault": "exception", "text": sentence}
    ]
    assert steps_of(tmp_path / "runs/a") == list(range(32, 1025, 32))
    assert "1 × exception or NaN" in (tmp_path / "runs/a/report.html").read_text()


@pytest.mark.parametrize("what", ["observation", "reward"])
@backends
def test_a_fault_that_is_not_to_be_survived_ends_training_and_leaves_a_checkpoint_to_go_on_from(
    what: str, backend: list[str], tmp_path: Path, here: Here
) -> None:
    often = ["--checkpoint-every", "320", "--env-kwargs", f"{{steps: 200, what: {what}}}"]
    result = here(*LATE, *often, *backend, "--max-env-restarts", "0", "--quiet", "--json")
    assert result.returncode == 1
    told, said = result.stderr.rstrip("\n").split("unidle: ", 1)
    assert json.loads(result.stdout) == {"error": said}
    sentence, text, way_out = said.splitlines()
    assert told.rstrip("\n") == text  # when it happened, and once more as what ended the run
    assert way_out == "Fix it, then resume with: unidle train --resume runs/a"
    assert sentence.startswith("Environment 1 failed ")
    assert "max_env_restarts allows 0." in sentence
    assert text.startswith(f"Environment 1 returned a NaN or infinite {what} in episode 40 (seed ")
    kept = sorted(path.name for path in (tmp_path / "runs/a/checkpoints").iterdir())
    assert kept == ["step-000000000320.pt", "step-000000000384.pt"]  # the one that was due, and where it ended
    assert "384" in (tmp_path / "runs/a/report.html").read_text()
    answer = json.loads(sound(here("eval", "runs/a", "--episodes", "2", "--json")).stdout)
    assert answer["step"] == 384
    assert all(0 <= value <= 5 for value in answer["returns"])
    sound(here("train", "--resume", "runs/a", "--max-env-restarts", "10", "--quiet"))
    assert steps_of(tmp_path / "runs/a") == list(range(32, 1025, 32))


def test_a_run_that_fails_ends_the_process_with_exit_code_1_and_one_that_survives_with_0(tmp_path: Path) -> None:
    failed = unidle(tmp_path, *LATE, "--max-env-restarts", "0", "--quiet")
    assert failed.returncode == 1
    assert "\nunidle: Environment 1 failed " in failed.stderr
    assert "Environment 1 returned a NaN or infinite observation in episode 40" in failed.stderr
    assert "Traceback" not in failed.stderr
    survived = sound(unidle(tmp_path, *LATE, "--quiet", "--run-name", "b"))
    assert survived.stderr.startswith("Environment 1 returned a NaN or infinite observation in episode 40")
    assert survived.stdout == ""


@pytest.mark.parametrize("command", ["train", "diagnose"])
def test_a_job_that_runs_out_of_gpu_memory_ends_with_what_to_do(command: str, tmp_path: Path) -> None:
    job = ["--env", "cli_envs:Choice", *CLASSIC, *SMALL, "--network", "own_networks:Insatiable"]
    result = unidle(tmp_path, command, *job, *(["--seconds", "1"] if command == "diagnose" else []))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("unidle: The GPU ran out of memory while allocating 2.00 GiB; stop other programs on it")
    assert "fewer --n-envs" in last


@backends
def test_the_traceback_of_an_environment_that_raises_again_and_again_is_shown_once(
    backend: list[str], tmp_path: Path, here: Here
) -> None:
    raising = ["train", *SMALL, *CLASSIC, "--env", "cli_envs:Raising", "--timesteps", "640", "--run-name", "a"]
    result = sound(here(*raising, *backend))
    said = result.stderr
    faults = faults_of(tmp_path / "runs/a")
    assert len(faults) > 5
    assert said.count("  Traceback (most recent call last):\n") == 1
    assert said.count("  ConnectionError: the simulator does not answer\n") == 1
    assert all("Traceback" in fault["text"] for fault in faults)  # where all of them can be read
    shown = re.findall(r"^Environment \d failed in episode .*: ConnectionError: the simulator", said, re.MULTILINE)
    held_back = re.findall(r"(?:^| \()(\d+) similar messages not shown", said, re.MULTILINE)
    assert len(shown) < len(faults) == len(shown) + sum(map(int, held_back))
    assert re.search(
        rf"^faults +{len(faults)} × exception or NaN; .* runs/a/metrics.jsonl for details$", result.stdout, re.MULTILINE
    )


# -- settings --------------------------------------------------------------------------------------------------------


def test_every_way_to_write_a_flag_arrives_in_the_config(tmp_path: Path, here: Here) -> None:
    words = "--num_envs 2 --n_steps=8 --batch-size auto --net-arch 8,8 --no-subproc --n-epochs 1 --target-kl none"
    words += " --workers auto --slices none --checkpoint-every=auto"
    more = "--total-timesteps 1.6e1 --eval-every 0 --no-tensorboard --normalize-obs --target-return none --run-name a"
    kwargs = ["--env-kwargs", "{answer: 1}", "--preset", "classic", "--quiet", "--no-pin-cores"]
    sound(here("train", "--env", "cli_envs:Choice", *kwargs, *words.split(), *more.split()))
    settings = settings_of(tmp_path / "runs/a")
    expected = {
        "n_envs": 2,
        "n_steps": 8,
        "batch_size": 16,  # the largest divisor of 16 that is not above classic's 64
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


@pytest.mark.parametrize("words", ["--subproc auto --pin_cores none", "--subproc=none --pin-cores=auto"])
def test_a_switch_is_left_to_unidle_by_the_word_that_any_setting_is(words: str, tmp_path: Path, here: Here) -> None:
    (tmp_path / "a.yaml").write_text("subproc: false\npin_cores: true\n")
    sound(here(*CHOICE, "--config", "a.yaml", *words.split(), "--timesteps", "32", "--quiet", "--run-name", "a"))
    settings = settings_of(tmp_path / "runs/a")
    assert settings["subproc"] is settings["pin_cores"] is None


@pytest.mark.parametrize("flag", [["--num_envs", "4"], ["--num-envs=4"], ["--n_envs", "4"], ["--n-envs=4"]])
def test_num_envs_is_n_envs(flag: list[str], tmp_path: Path, here: Here) -> None:
    words = ["--n-steps", "4", "--batch-size", "4", "--timesteps", "1", "--eval-every", "0", "--run-name", "a"]
    sound(here("train", "--env", "cli_envs:Choice", *words, *flag, "--quiet"))
    assert settings_of(tmp_path / "runs/a")["n_envs"] == 4


def test_batch_size_auto_is_the_largest_divisor_not_above_the_presets(tmp_path: Path, here: Here) -> None:
    words = ["--n-envs", "3", "--n-steps", "70", "--n-epochs", "1", "--timesteps", "1", "--eval-every", "0"]
    for preset in ("classic", "fast"):
        sound(
            here(
                "train",
                "--env",
                "cli_envs:Choice",
                *words,
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
    assert settings_of(tmp_path / "runs/classic")["batch_size"] == 42  # of 210, at most 64
    assert settings_of(tmp_path / "runs/fast")["batch_size"] == 210  # at most 2048


def test_a_flag_overrides_the_file_which_overrides_the_preset(tmp_path: Path, here: Here) -> None:
    (tmp_path / "mine.yaml").write_text("n_steps: 8\nbatch_size: 8\ngamma: 0.9\nnet_arch: [8]\neval_every: 0\n")
    words = ["--preset", "fast", "--config", "mine.yaml", "--gamma", "0.5", "--timesteps", "1", "--n-epochs", "2"]
    sound(here("train", "--env", "cli_envs:Choice", *words, "--run-name", "a", "--quiet"))
    settings = settings_of(tmp_path / "runs/a")
    assert settings["preset"] == "fast"
    assert settings["n_envs"] == 16  # the preset's
    assert settings["n_steps"] == 8  # the file's, where the preset has 256
    assert settings["gamma"] == 0.5  # the flag's, where the file has 0.9
    assert settings["n_epochs"] == 2  # the flag's, where the preset has 15


def test_the_config_file_of_a_run_reproduces_it(tmp_path: Path, here: Here) -> None:
    sound(here(*CHOICE, "--timesteps", "96", "--seed", "3", "--gamma", "0.9", "--run-name", "a", "--quiet"))
    sound(here("train", "--config", "runs/a/config.yaml", "--run-name", "b", "--quiet"))
    learned = [
        [
            (key, value)
            for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
            for key, value in json.loads(line).items()
            if key.startswith(("train/", "eval/"))
        ]
        for name in ("a", "b")
    ]
    assert len(learned[0]) > 20
    assert learned[0] == learned[1]


def test_subproc_and_no_subproc_choose_where_environments_live(here: Here) -> None:
    run = [*CHOICE, "--timesteps", "1", "--eval-every", "0"]
    assert re.search(r"2 worker processes \(\S+ µs per step", sound(here(*run, "--subproc", "--workers", "2")).stderr)
    assert re.search(r"in this process \(\S+ µs per step", sound(here(*run, "--no-subproc")).stderr)


def test_an_environment_and_a_network_are_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text("import cli_envs\ndef make(): return cli_envs.Choice()\n")
    (tmp_path / "mind.py").write_text("import torch\ndef make(sees, does): return torch.nn.Linear(2, 5)\n")
    words = ["train", "--env", "place:make", "--network", "mind:make", *SMALL, "--timesteps", "32", "--subproc"]
    sound(unidle(tmp_path, *words, "--eval-every", "0", "--run-name", "a", "--quiet"))
    assert "mean return" in sound(unidle(tmp_path, "eval", "runs/a", "--episodes", "2")).stdout


def test_discretize_cuts_a_continuous_action_into_bins(tmp_path: Path, here: Here) -> None:
    from unidle.api import load

    pendulum = ["train", "--env", "Pendulum-v1", *SMALL, "--timesteps", "32", "--eval-every", "0", "--quiet"]
    sound(here(*pendulum, "--discretize", "3", "--run-name", "a"))
    run = load(tmp_path / "runs/a")
    assert run.agent.action_layout.nvec == (3,)
    observation = run.agent.obs_layout.space.sample()
    actions = {float(run.predict(observation, deterministic=False)[0]) for _ in range(100)}
    assert actions == {-2.0, 0.0, 2.0}


def test_plain_lines_are_shown_when_piped(tmp_path: Path) -> None:
    result = sound(unidle(tmp_path, *CHOICE, "--timesteps", "64", "--run-name", "a", env=environment(FORCE_COLOR="1")))
    assert "\x1b[2K" not in result.stderr  # what a live panel is drawn with
    assert re.search(r"^100 %  step 64 of 64  ", result.stderr, re.MULTILINE)
    assert re.search(r"^evaluation .* over 2 episodes", result.stderr, re.MULTILINE)
    assert "runs/a/checkpoints/best.pt" in result.stdout


def test_quiet_shows_no_progress_and_no_summary(here: Here) -> None:
    result = sound(here(*CHOICE, "--timesteps", "64", "--quiet"))
    assert result.stdout + result.stderr == ""


def test_quiet_still_tells_what_is_ignored(tmp_path: Path, here: Here) -> None:
    (tmp_path / "theirs.yaml").write_text("policy: MlpPolicy\nn_timesteps: 64\nsde_sample_freq: 4\n")
    words = ["--config", "theirs.yaml", "--env", "cli_envs:Choice", *SMALL]
    result = sound(here("train", *words, "--quiet"))
    assert result.stdout == ""
    assert "`sde_sample_freq`" in result.stderr
    assert " % " not in result.stderr


# -- names, and going on ---------------------------------------------------------------------------------------------


def test_a_second_run_of_the_same_name_is_refused(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (trained / "runs/a").rglob("*")}
    sentence = complaint(unidle(trained, *CHOICE, "--run-name", "a", "--quiet"))
    assert sentence == "There is already a run in runs/a; resume it with --resume runs/a, or choose another --run-name."
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_runs_without_a_name_get_one_each(tmp_path: Path, here: Here) -> None:
    for _ in range(2):
        sound(here(*CHOICE, "--timesteps", "1", "--eval-every", "0", "--quiet"))
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["cli_envs-Choice-ppo-classic-seed0", "cli_envs-Choice-ppo-classic-seed0-2"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--learning-rate 1e-3", "A resumed run keeps its recipe, but learning_rate would change it; remove it,"),
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
def test_resume_refuses_to_change_what_is_learned(
    words: str, sentence: str, trained: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = (trained / "runs/a/config.yaml").read_text()
    assert sentence in complaint(here("train", "--resume", "runs/a", *words.split()))
    assert (trained / "runs/a/config.yaml").read_text() == before


def test_resume_with_more_timesteps_goes_on(trained: Path) -> None:
    shutil.copytree(trained / "runs/a", trained / "runs/longer")
    words = ["--resume", "runs/longer", "--timesteps", "160", "--learning-rate", "3e-4", "--subproc"]  # 3e-4: as it was
    answer = json.loads(sound(unidle(trained, "train", *words, "--json")).stdout)
    assert answer["step"] == 160
    assert steps_of(trained / "runs/longer") == [32, 64, 96, 128, 160]
    assert settings_of(trained / "runs/longer")["timesteps"] == 160
    assert steps_of(trained / "runs/a") == [32, 64]


# -- stopping --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The program at work in a process group of its own, as a shell would have it."""
    process = subprocess.Popen(
        [PROGRAM, *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_gone(pid: int) -> bool:
    """Whether no such process is left, or only its entry that nobody has read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop_it(folder: Path, number: int, send: Callable[[int, int], None]) -> subprocess.Popen[str]:
    """Train without end, with two workers; send the signal in the midst of it and wait for the end."""
    endless = ["--timesteps", "100000000", "--eval-every", "0", "--run-name", "a", "--subproc", "--workers", "2"]
    with started(folder, *CHOICE, *endless) as process:
        metrics = folder / "runs/a/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        workers = children_of(process.pid)
        assert len(workers) == 2
        send(process.pid, number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "Stopping after this iteration and saving" in said
    wait_for(lambda: all(map(is_gone, workers)), 5)
    return process


def assert_saved_and_resumable(folder: Path) -> None:
    steps = steps_of(folder / "runs/a")
    assert (folder / f"runs/a/checkpoints/step-{steps[-1]:012d}.pt").exists()
    assert (folder / "runs/a/report.html").exists()
    sound(unidle(folder, "train", "--resume", "runs/a", "--timesteps", str(steps[-1] + 64), "--quiet"))
    assert steps_of(folder / "runs/a") == [*steps, steps[-1] + 32, steps[-1] + 64]


def test_ctrl_c_saves_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    stop_it(tmp_path, signal.SIGINT, os.killpg)  # as a terminal sends it: to the workers too
    assert_saved_and_resumable(tmp_path)


def test_so_does_a_sigterm(tmp_path: Path) -> None:
    stop_it(tmp_path, signal.SIGTERM, os.kill)
    assert_saved_and_resumable(tmp_path)


def test_so_does_a_sigterm_to_the_whole_group_as_timeout_and_slurm_send_it(tmp_path: Path) -> None:
    stop_it(tmp_path, signal.SIGTERM, os.killpg)


@pytest.mark.parametrize("background", [False, True], ids=["in front", "as a shell's background job"])
def test_a_second_ctrl_c_stops_at_once(background: bool, tmp_path: Path) -> None:
    slow = ["--env-kwargs", "{pause: 0.05}", "--n-steps", "1024", "--no-subproc", "--run-name", "a"]  # 100 s a rollout
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    try:
        running = started(tmp_path, *CHOICE, *slow)  # inherits an ignored Ctrl-C
        process = running.__enter__()
    finally:
        signal.signal(signal.SIGINT, handler)
    with contextlib.ExitStack() as ending:
        ending.push(running.__exit__)
        assert process.stderr is not None
        wait_for((tmp_path / "runs/a/checkpoints/step-000000000000.pt").exists)
        time.sleep(0.2)  # so that it is stepping
        process.send_signal(signal.SIGINT)
        assert any("Ctrl-C again: stop immediately" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.splitlines()[-1] == "unidle: Stopped immediately; the last checkpoint is kept."
    assert "Traceback" not in said


# -- presets ---------------------------------------------------------------------------------------------------------


LARGE = ["device", "dqn", "isaac", "max-gpu"]
META_WORLD = ["mt10-20m", "mt10-2m", "mt10-paper-1024", "mt10-paper-400", "mt50-paper-1024"]


@pytest.mark.parametrize(
    ("cores", "fits", "instead"),
    [
        (1, ["classic", "device", "dqn", "sac", "site-explore", "td3"], "classic"),
        (4, SMALL_PRESETS, "fast"),
        (8, ["classic", "fast", "heavy", "device", "dqn", "max-gpu", "sac", "site-explore", "td3"], "heavy"),
        (16, ["classic", "fast", "heavy", "beast", *LARGE, *META_WORLD, "sac", "site-explore", "td3"], "beast"),
    ],
)
def test_the_table_of_presets_tells_which_fit_and_what_to_take_instead(
    cores: int, fits: list[str], instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: cores)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 64 * 2**30)
    assert run_here(["presets"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    rows = [line.split(maxsplit=1) for line in table.splitlines()[1:]]
    assert [name for name, row in rows if row.rstrip().endswith("  fits")] == fits
    for name, row in rows:
        if name not in fits:  # for fixed numbers there is nothing else to take
            assert row.rstrip().endswith("  too small" if name in META_WORLD else f"  too small, use {instead}")
    assert f"This machine: {cores} {'core' if cores == 1 else 'cores'}, 64 GB of memory. `heavy` is" in rest


def test_presets_that_want_more_memory_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: 64)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 2 * 2**30)
    assert run_here(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["presets"]
    assert [row["preset"] for row in rows if row["fits"]] == [
        "classic",
        "fast",
        "device",
        "dqn",
        "sac",
        "site-explore",
        "td3",
    ]
    assert {row["instead"] for row in rows if not row["fits"] and row["preset"] not in META_WORLD} == {"fast"}
    assert {row["instead"] for row in rows if row["fits"]} == {None}


def test_the_table_names_no_preset_to_take_where_none_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets_command, "available_cores", lambda: 1)
    monkeypatch.setattr(presets_command, "available_memory", lambda: 2**29)
    assert run_here(["presets"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert all(line.rstrip().endswith("  too small") for line in table.splitlines()[1:])
    assert "This machine: 1 core, 0.5 GB of memory. Even `classic` may run out of memory." in rest


def test_presets_count_only_the_cores_that_slurm_or_the_affinity_mask_grants(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    granted = [
        {"env": environment(SLURM_CPUS_PER_TASK="1")},
        {"preexec_fn": lambda: os.sched_setaffinity(0, {core})},
    ]
    for options in granted:
        assert "This machine: 1 core, " in sound(unidle(tmp_path, "presets", **options)).stdout
