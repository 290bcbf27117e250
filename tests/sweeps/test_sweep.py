"""Sweeps: trials that share a process, pruning, what a kill leaves, and mistakes."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from processes import wait_until
from resumed_runs import assert_same, final_state

import unidle
from unidle.cli.main import run as command_line
from unidle.engine.trainer import Trainer
from unidle.groups.folder import GroupFolder
from unidle.sweeps import sweep as sweep_module
from unidle.sweeps.folder import SweepFolder
from unidle.sweeps.plan import Plan
from unidle.sweeps.space import read_space
from unidle.sweeps.study import Study

SETTINGS: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 1,
    "net_arch": (8,),
    "timesteps": 320,
    "eval_episodes": 1,
    "eval_max_steps": 20,
    "tensorboard": False,
    "device": "cpu",
}
SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "net_arch": [[8], [16, 16]], "n_epochs": [1, 2]}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(env: Any = "CartPole-v1", **changes: Any) -> unidle.Sweep:
    given = {**SETTINGS, "space": SPACE, "trials": 5, "at_once": 2, "run_name": "s", "quiet": True, **changes}
    for name in {*SPACE, *given["space"]} - changes.keys():
        given.pop(name, None)
    return unidle.sweep(env, **given)


def journal(path: str = "runs/s") -> optuna.Study:
    """The study, as optuna-dashboard reads it."""
    storage = JournalStorage(JournalFileBackend(f"{path}/journal.log"))
    (found,) = storage.get_all_studies()
    return optuna.load_study(study_name=found.study_name, storage=storage)


def test_every_trial_is_an_ordinary_run_judged_by_its_last_evaluation() -> None:
    swept = sweep()
    assert [trial.number for trial in swept.trials] == [0, 1, 2, 3, 4]
    for trial in swept.trials:
        run = unidle.load(trial.path)
        assert {name: getattr(run.config.recipe, name) for name in SPACE} == {
            name: tuple(value) if isinstance(value, list) else value for name, value in trial.settings.items()
        }
        assert trial.value == run.summary()["final_evaluation"]
        assert yaml.safe_load((trial.path / "trial.yaml").read_text())["state"] == trial.state == "finished"
        assert run.report.is_file()
    assert len({str(trial.settings) for trial in swept.trials}) == 5
    best = max(swept.trials, key=lambda trial: trial.rank)
    assert swept.best == best.settings


def test_trial_learns_what_a_run_of_its_settings_learns_alone() -> None:
    trial = sweep().trials[3]
    settings = {**SETTINGS, **trial.settings}
    alone = unidle.train("CartPole-v1", run_name="alone", quiet=True, **settings)
    ours, theirs = final_state(trial.path), final_state(alone.path)
    assert_same(ours["algo"], theirs["algo"])


def test_best_settings_are_a_config_file() -> None:
    swept = sweep(trials=3)
    best = swept.best_trial
    assert best is not None
    again = unidle.train("CartPole-v1", config=swept.best_file, run_name="again", device="cpu", quiet=True)
    assert_same(final_state(best.path)["algo"], final_state(again.path)["algo"])


def test_two_trials_are_asked_for_before_one_ends() -> None:
    sweep(trials=4)
    trials = journal().trials
    assert all(trial.datetime_start and trial.datetime_complete for trial in trials)
    starts, ends = [t.datetime_start for t in trials], [t.datetime_complete for t in trials]
    assert starts[1] < min(ends)  # type: ignore[type-var,operator]
    for number in (2, 3):  # the next starts when one has ended, and the other still trains
        assert sum(end <= starts[number] for end in ends) == number - 1  # type: ignore[operator]


def test_journal_has_settings_and_evaluations_of_every_trial() -> None:
    swept = sweep()
    for trial, record in zip(journal().trials, swept.trials, strict=True):
        assert trial.user_attrs["settings"] == record.settings
        assert list(trial.intermediate_values) == list(range(1, 11))
        assert trial.value == record.value == trial.intermediate_values[10]


def test_batch_sizes_are_mapped_to_divisors_of_the_rollout() -> None:
    swept = sweep(space={"batch_size": [3, 24, 1024]}, batch_size="auto", trials=6, timesteps=32, sampler="random")
    assert {trial.parameters["batch_size"]: trial.settings["batch_size"] for trial in swept.trials} == {
        3: 2,
        24: 16,
        1024: 32,
    }


def test_total_batch_is_searched_in_place_of_the_rollout() -> None:
    given = {**SETTINGS, "batch_size": "auto", "timesteps": 64, "run_name": "s", "quiet": True}
    del given["n_steps"], given["n_envs"]
    swept = unidle.sweep("CartPole-v1", space={"total_batch": [32, 60], "n_envs": [2, 3]}, trials=6, **given)
    for trial in swept.trials:
        batch = trial.settings["n_envs"] * trial.settings["n_steps"]
        assert abs(batch - trial.parameters["total_batch"]) <= 1
    assert swept.best is not None
    again = unidle.train("CartPole-v1", config=swept.best_file, run_name="again", device="cpu", quiet=True)
    assert again.config.recipe.n_steps == swept.best["n_steps"]


def test_trial_of_several_seeds_is_a_group_judged_by_its_mean() -> None:
    swept = sweep(trials=2, seeds_per_trial=2, seed=7)
    for trial in swept.trials:
        runs = [unidle.load(trial.path / f"seed-{seed}") for seed in (7, 8)]
        assert [run.config.run.seed for run in runs] == [7, 8]
        finals = [run.summary()["final_evaluation"] for run in runs]
        assert trial.value == pytest.approx(sum(finals) / 2)
        assert GroupFolder.open(trial.path).seeds == (7, 8)


def test_pruned_trial_stops_and_the_next_takes_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna.pruners.MedianPruner.prune", lambda self, study, trial: trial.number == 1)
    swept = sweep(trials=4)
    states = [trial.state for trial in swept.trials]
    assert states == ["finished", "pruned", "finished", "finished"]
    pruned = swept.trials[1]
    assert list(pruned.evaluations) == [1]
    assert unidle.load(pruned.path).summary()["step"] < 320
    assert yaml.safe_load((pruned.path / "trial.yaml").read_text())["state"] == "pruned"


def test_median_pruner_stops_trials_below_the_median_of_the_others() -> None:
    swept = sweep(space={"learning_rate": SPACE["learning_rate"]}, trials=12, sampler="random", eval_max_steps=200)
    states = [trial.state for trial in swept.trials]
    assert states.count("finished") >= 5  # before it has five to compare with, it stops none
    assert "pruned" in states
    for trial in swept.trials:
        assert list(trial.evaluations) == list(range(1, 1 + len(trial.evaluations)))
        assert (trial.state == "pruned") == (len(trial.evaluations) < 10)


@pytest.mark.parametrize("pruner", ["hyperband", "none"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_every_sampler_and_pruner_runs(sampler: Any, pruner: Any) -> None:
    swept = sweep(sampler=sampler, pruner=pruner, trials=3, timesteps=64)
    assert [trial.is_over for trial in swept.trials] == [True] * 3


def test_wilcoxon_pruner_trains_seeds_in_turn_and_compares_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, list[float]]] = []

    def prune(self: Any, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        compared.append((trial.number, list(trial.intermediate_values.values())))
        return trial.number == 1 and len(trial.intermediate_values) == 2

    monkeypatch.setattr("optuna.pruners.WilcoxonPruner.prune", prune)
    swept = sweep(trials=3, at_once=1, seeds_per_trial=5, pruner="wilcoxon", timesteps=64)
    assert [trial.state for trial in swept.trials] == ["finished", "pruned", "finished"]
    for trial in swept.trials:
        runs = [path for path in GroupFolder.open(trial.path).runs if path.exists()]
        finals = [unidle.load(path).summary()["final_evaluation"] for path in runs]
        seen = [values for number, values in compared if number == trial.number]
        assert seen == [finals[: n + 1] for n in range(min(4, len(finals)))]  # nothing is saved after the last
        assert len(finals) == (2 if trial.state == "pruned" else 5)
        if trial.state == "finished":
            assert trial.value == pytest.approx(sum(finals) / 5)


def test_wilcoxon_pruner_stops_a_trial_that_is_worse_seed_by_seed() -> None:
    """A learning rate of 1e-9 learns nothing."""
    space = {"learning_rate": [0.003, 1e-9], "n_epochs": [10]}
    how = {"sampler": "random", "timesteps": 1600, "eval_episodes": 5, "eval_max_steps": 200, "batch_size": 16}
    swept = sweep(space=space, trials=6, at_once=1, seeds_per_trial=6, pruner="wilcoxon", **how)
    states = {(trial.settings["learning_rate"], trial.state) for trial in swept.trials}
    assert (0.003, "finished") in states
    assert (1e-9, "pruned") in states
    assert (0.003, "pruned") not in states


def test_several_objectives_give_a_front() -> None:
    objectives: list[Any] = ["return", "return-per-gpu-second"]
    swept = sweep(trials=5, objective=objectives)
    for trial in swept.trials:
        assert trial.values[0] == unidle.load(trial.path).summary()["final_evaluation"]
        seconds = trial.values[0] / trial.values[1]
        assert 0 < seconds < trial.seconds  # type: ignore[operator]
        assert list(yaml.safe_load((trial.path / "trial.yaml").read_text()))[2:4] == objectives
    best, fastest = (max(swept.trials, key=lambda trial: (trial.values[i], trial.values)) for i in (0, 1))
    front = [trial.number for trial in swept.front]
    assert {best.number, fastest.number} <= {*front}
    assert best.number == front[0]
    assert sorted(path.name for path in Path("runs/s/pareto").iterdir()) == sorted(f"trial-{n}.yaml" for n in front)
    again = unidle.train("CartPole-v1", config=f"runs/s/pareto/trial-{front[-1]}.yaml", run_name="again", quiet=True)
    assert again.config.recipe.learning_rate == swept.front[-1].settings["learning_rate"]
    assert len(journal().directions) == 2
    resumed = unidle.resume_sweep("runs/s", trials=6, quiet=True)
    assert [trial.values for trial in resumed.trials[:5]] == [trial.values for trial in swept.trials]


def test_time_to_the_target_is_that_of_the_first_evaluation_that_reaches_it() -> None:
    how = {"target_return": 19.5, "eval_max_steps": 20, "eval_episodes": 3, "timesteps": 640}
    swept = sweep(trials=4, objective="time-to-target", space={"learning_rate": [0.003, 1e-9]}, **how)
    reached = 0
    for trial in swept.trials:
        (evaluations,) = [[r for r in unidle.load(trial.path).records if r["kind"] == "evaluation"]]
        if evaluations[-1]["eval/return_mean"] >= 19.5:
            assert trial.value == evaluations[-1]["wall"]
            reached += 1
        else:
            highest = max(record["eval/return_mean"] for record in evaluations)
            assert trial.value == pytest.approx(1e9 + 19.5 - highest)
    best = swept.best_trial
    assert best is not None
    assert best.value == min(trial.values[0] for trial in swept.trials)
    assert journal().direction.name == "MINIMIZE"


# -- failures ----------------------------------------------------------------------------------------------------------


def test_failed_trial_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of 1e30 makes the weights NaN."""
    swept = sweep(space={"learning_rate": [1e-3, 1e-4, 1e30]}, trials=6, sampler="random")
    states = {trial.settings["learning_rate"]: trial.state for trial in swept.trials}
    assert states == {1e-3: "finished", 1e-4: "finished", 1e30: "failed"}
    failed = next(trial for trial in swept.trials if trial.state == "failed")
    assert failed.error is not None
    assert yaml.safe_load((failed.path / "trial.yaml").read_text())["error"] == failed.error
    assert failed.value is None
    assert f"Trial {failed.number} failed: " in capsys.readouterr().err


def test_trials_that_have_ended_or_failed_free_their_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Trainer] = weakref.WeakSet()
    counts: list[int] = []

    class Counted(Trainer):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr("unidle.api.build.Trainer", Counted)
    swept = sweep(space={"learning_rate": [1e-3, 1e-4, 1e30]}, trials=8, sampler="random")
    assert {trial.state for trial in swept.trials} == {"finished", "failed"}
    assert counts == [1] + [2] * 7


def test_sweep_in_which_all_trials_fail_stops() -> None:
    with pytest.raises(unidle.TrainingError, match="The first 5 trials failed, the last because: "):
        sweep(space={"learning_rate": [1e30, 1e31]}, trials=50)
    assert len(journal().trials) == 6  # one was running


# -- stopping and resuming ---------------------------------------------------------------------------------------------


def command(*arguments: str, trials: int = 6) -> list[str]:
    """The command that starts the sweep `s`, of runs that take a few seconds each."""
    Path("space.yaml").write_text(yaml.safe_dump(SPACE))
    given = {**SETTINGS, "timesteps": 3200, "checkpoint_every": 64}
    flags = ["--env", "CartPole-v1", "--trials", str(trials), "--at-once", "2", "--run-name", "s", *arguments]
    flags += ["--space", "space.yaml", "--no-tensorboard"]
    for name, value in given.items():
        if name not in SPACE and name != "tensorboard":
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return [sys.executable, "-m", "unidle", "sweep", *flags]


def stop_after(finished: int, number: signal.Signals, arguments: list[str]) -> int:
    """Send a signal to the sweep once so many trials have finished; returns its exit code."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list(Path("runs/s").glob("trial-*/trial.yaml"))) < finished or not has_checkpoint(finished + 1):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait()


def has_checkpoint(trial: int) -> bool:
    return len(list(Path(f"runs/s/trial-{trial}/checkpoints").glob("step-*"))) > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_sweep_continues_without_losing_a_trial(number: signal.Signals) -> None:
    code = stop_after(2, number, command())
    assert code == (-9 if number == signal.SIGKILL else 128 + 2)
    before = {trial.number: trial for trial in journal().trials}
    finished = [n for n, trial in before.items() if trial.state.is_finished()]
    running = [n for n, trial in before.items() if not trial.state.is_finished()]
    assert len(finished) >= 2
    assert 1 <= len(running) <= 2

    swept = unidle.resume_sweep("runs/s", quiet=True)
    assert [trial.number for trial in swept.trials] == [*range(6)]
    assert all(trial.is_over for trial in swept.trials)
    assert not any(trial.state == "failed" for trial in swept.trials)
    for n, trial in before.items():
        assert swept.trials[n].parameters == trial.params
    for n in finished:
        assert swept.trials[n].value == before[n].value
    resumed = next(trial for trial in swept.trials if trial.number in running)
    assert [line["kind"] for line in unidle.load(resumed.path).records].count("iteration") >= 1
    if resumed.state == "finished":  # as if it had never stopped
        settings = {**SETTINGS, "timesteps": 3200, **resumed.settings}
        alone = unidle.train("CartPole-v1", run_name="alone", quiet=True, **settings)
        assert_same(final_state(resumed.path)["algo"], final_state(alone.path)["algo"])


def test_sweep_killed_at_random_moments_keeps_every_trial_that_a_dashboard_has_shown() -> None:
    """Reads the journal as optuna-dashboard does, from another process and while the sweep writes it."""
    moment = random.Random(1)
    shown: dict[int, optuna.trial.FrozenTrial] = {}
    start = command(trials=12)
    for _ in range(3):
        begun = len(journal().trials) if Path("runs/s/journal.log").exists() else 0
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until, trains = time.monotonic() + 120, False
        while time.monotonic() < until:
            assert process.poll() is None
            if Path("runs/s/journal.log").exists() and Path("runs/s/trial-0").exists():
                trials = journal().trials
                shown |= {trial.number: trial for trial in trials if trial.state.is_finished()}
                if not trains and len(trials) > begun:
                    trains, until = True, time.monotonic() + moment.uniform(0.1, 1.2)
            time.sleep(0.01)
        assert trains
        process.kill()
        assert process.wait() == -9
        start = [sys.executable, "-m", "unidle", "sweep", "--resume", "runs/s"]
    swept = unidle.resume_sweep("runs/s", quiet=True)
    assert [trial.number for trial in swept.trials] == [*range(12)]
    assert all(trial.is_over for trial in swept.trials)
    kept = journal().trials
    for number, trial in shown.items():
        assert (kept[number].state, kept[number].values) == (trial.state, trial.values)
        assert kept[number].user_attrs == trial.user_attrs
        assert kept[number].intermediate_values == trial.intermediate_values


def test_half_written_line_and_lock_of_a_killed_process_are_removed() -> None:
    sweep(trials=2)
    file = Path("runs/s/journal.log")
    file.write_bytes(file.read_bytes() + b'{"op_code": 5, "trial')
    file.with_name("journal.log.lock").symlink_to(file)
    swept = unidle.resume_sweep("runs/s", trials=3, quiet=True)
    assert [trial.state for trial in swept.trials] == ["finished"] * 3
    assert len(journal().trials) == 3


def test_resumed_sweep_does_not_repeat_the_settings_of_earlier_trials() -> None:
    sweep(trials=3, sampler="random")
    swept = unidle.resume_sweep("runs/s", trials=6, quiet=True)
    assert len({trial.settings["learning_rate"] for trial in swept.trials}) == 6


def test_budget_ends_a_sweep_once_the_running_trials_are_over() -> None:
    swept = sweep(trials=1000, seconds=0.5)
    assert 1 <= len(swept.trials) < 1000
    assert all(trial.is_over for trial in swept.trials)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "`trials` is 0; it must be an integer of at least 1"),
        ({"at_once": 2000}, "2000 trials with 1 seeds each are too many runs at once; use at most 1,024"),
        ({"pruner": "wilcoxon"}, "use it with --seeds-per-trial 5 or more and the objective return"),
        ({"objective": "reward"}, "`objective` is 'reward'; use one or more of return, return-per-gpu-second, time-to"),
        ({"objective": ["return", "return"]}, "`objective` is ['return', 'return']; use one or more of"),
        ({"objective": "time-to-target"}, "The objective time-to-target needs a target; add --target-return"),
        (
            {"objective": "time-to-target", "target_return": 9, "pruner": "median"},
            "Trials cannot be pruned by time-to-target; remove --pruner median",
        ),
        ({"sampler": "grid"}, "`sampler` is 'grid'; use tpe or random"),
        ({"eval_every": 0}, "A sweep judges trials by their evaluations, but `eval_every` is 0; remove it"),
        ({"space": {"gama": [0.9]}}, "there is no setting `gama`; did you mean `gamma`?"),
        ({"env": "CartPole-v9"}, "CartPole"),
    ],
)
def test_mistakes_are_refused_before_a_folder_is_created(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(unidle.UsageError, match=re.escape(message)):
        sweep(**changes)
    assert not Path("runs").exists()


def test_sweep_is_neither_started_twice_nor_by_two_processes() -> None:
    sweep(trials=1)
    with pytest.raises(
        unidle.UsageError, match=r"There is already a run in runs/s; .*: unidle sweep --resume runs/s\."
    ):
        sweep(trials=1)
    folder = SweepFolder.open(Path("runs/s").absolute())
    folder.lock()
    with pytest.raises(unidle.UsageError, match="Another process is training in runs/s; wait for it, or stop it"):
        unidle.resume_sweep("runs/s", trials=2, quiet=True)
    folder.unlock()


def test_folder_of_something_else_is_not_a_sweep() -> None:
    Path("runs/other").mkdir(parents=True)
    with pytest.raises(unidle.UsageError, match=r"runs/other is not the folder of a sweep: it has no sweep\.yaml"):
        unidle.resume_sweep("runs/other")
    sweep(trials=1)
    with pytest.raises(unidle.UsageError, match="runs/s is a sweep; give one of its runs, such as runs/s/trial-0"):
        unidle.load("runs/s")


def test_missing_optuna_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "find_spec", lambda name: None)
    with pytest.raises(unidle.UsageError, match=r"needs the package optuna; run: pip install 'unidle\[sweep\]'"):
        sweep()
    assert not Path("runs").exists()


# -- the command line --------------------------------------------------------------------------------------------------


def test_command_prints_the_best_settings_and_how_to_train_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(command(trials=2)[3:]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^train +unidle train --config runs/s/best.yaml$", printed.out, re.MULTILINE)
    assert re.search(r"^trial 0: finished [\d.]+  [12] of 2 trials  best .*  learning_rate ", printed.err, re.MULTILINE)
    assert command_line(["sweep", "--resume", "runs/s", "--trials", "3", "--json"]) == 0
    assert '"finished": 3' in capsys.readouterr().out


def test_command_prints_the_front_of_several_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--objective", "return,return-per-gpu-second", "--timesteps", "64"]
    assert command_line(command(*flags, trials=3)[3:]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^trial +return +return per GPU second +settings *$", printed, re.MULTILINE)
    assert re.search(r"^ *\d +[\d.]+ +[\d.]+k? +learning_rate", printed, re.MULTILINE)
    assert "unidle train --config runs/s/pareto/trial-….yaml" in printed


def test_resumed_sweep_keeps_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(trials=1)
    for flags in (
        ["--gamma", "0.5"],
        ["--sampler", "random"],
        ["--space", "other.yaml"],
        ["--objective", "return-per-gpu-second"],
    ):
        assert command_line(["sweep", "--resume", "runs/s", *flags]) == 2
        assert f"A resumed sweep keeps its settings; remove {flags[0]}" in capsys.readouterr().err


def test_plan_and_space_survive_the_folder() -> None:
    plan = Plan(trials=1, at_once=3, sampler="random", pruner="none")
    sweep(trials=1, at_once=3, sampler="random", pruner="none")
    folder = SweepFolder.open(Path("runs/s"))
    assert folder.plan == plan
    assert folder.space == read_space(SPACE, folder.config)


def test_workers_share_a_sweep_and_no_trial_is_run_twice() -> None:
    sweep(trials=6, seconds=0)  # creates the folder, and starts no trial
    command = [sys.executable, "-m", "unidle", "sweep", "--resume", "runs/s", "--quiet", "--worker"]
    workers = [subprocess.Popen([*command, number], stderr=subprocess.PIPE, text=True) for number in ("1", "2")]
    try:
        wait_until(lambda: len([*Path("runs/s/workers").glob("*/.lock")]) == 2)
        for resume in ({"worker": 1}, {}):  # the same number again, and a process that would have it for itself
            with pytest.raises(unidle.UsageError, match="Another process"):
                unidle.resume_sweep("runs/s", quiet=True, **resume)
    finally:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    trials = journal().trials
    assert [trial.number for trial in trials] == list(range(6))
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    assert len({str(trial.params) for trial in trials}) == 6  # each worker draws settings of its own
    assert {trial.user_attrs["worker"] for trial in trials} == {1, 2}
    assert all(Path(f"runs/s/trial-{number}/trial.yaml").is_file() for number in range(6))
    assert Path("runs/s/best.yaml").is_file()


def test_worker_resumes_its_own_trials_and_unassigned_ones() -> None:
    sweep(trials=3, seconds=0)
    asked = []
    for worker in (None, 1, 2):  # killed while they trained
        folder = SweepFolder.open(Path("runs/s"))
        folder.lock(worker)
        trial = Study(folder).ask()
        assert trial is not None
        asked.append(trial.number)
        folder.unlock()
    resumed = unidle.resume_sweep("runs/s", worker=2, quiet=True)
    assert {trial.number: trial.state for trial in resumed.trials} == {0: "finished", 1: "running", 2: "finished"}
    resumed = unidle.resume_sweep("runs/s", quiet=True)
    assert [trial.state for trial in resumed.trials] == ["finished"] * 3


def test_worker_neither_starts_nor_changes_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["sweep", "CartPole-v1", "--worker", "1"]) == 2
    assert "add --resume and its folder" in capsys.readouterr().err
    sweep(trials=1, seconds=0)
    with pytest.raises(unidle.UsageError, match="A worker does not change a sweep"):
        unidle.resume_sweep("runs/s", worker=1, trials=2)
