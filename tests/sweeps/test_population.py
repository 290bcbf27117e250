"""Populations: what is copied and perturbed, that it repeats exactly, and that a kill changes nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from resumed_runs import assert_same, final_state

import unidle
from unidle.cli.main import run as command_line
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.groups.exploits import read_comparisons
from unidle.groups.training import SharedProcess

SETTINGS: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "net_arch": (8,),
    "timesteps": 384,
    "eval_every": 96,
    "eval_episodes": 3,
    "tensorboard": False,
    "device": "cpu",
}
SPACE = {"learning_rate": {"low": 1e-4, "high": 3e-2, "log": True}, "n_epochs": [1, 2, 4], "gamma": [0.9, 0.95, 0.99]}
OFF_POLICY = {
    "algo": "dqn",
    "n_envs": 2,
    "batch_size": 16,
    "learning_starts": 32,
    "buffer_size": 1000,
    "space": {"learning_rate": SPACE["learning_rate"], "gamma": SPACE["gamma"]},
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(name: str = "p", **changes: Any) -> unidle.TrainedGroup:
    given = {**SETTINGS, "seeds": 4, "space": SPACE, "run_name": name, "quiet": True, **changes}
    if given.get("algo") == "dqn":
        del given["n_steps"]
    return unidle.train_population("CartPole-v1", **given)


def assert_equal_populations(one: Path, other: Path) -> None:
    assert read_comparisons(one) == read_comparisons(other)
    for seed in range(4):
        ours, theirs = final_state(one / f"seed-{seed}"), final_state(other / f"seed-{seed}")
        assert_same(ours["algo"], theirs["algo"])
        assert_same(ours["collector"], theirs["collector"])
        assert ours["step"] == theirs["step"]


@pytest.mark.parametrize("changes", [{}, OFF_POLICY, {"overlap": "strict"}])
def test_same_seeds_give_the_same_events_and_weights(changes: dict[str, Any]) -> None:
    one, other = train("one", **changes), train("other", **changes)
    comparisons = read_comparisons(one.path)
    assert [comparison.step for comparison in comparisons] == [96, 192, 288]
    assert any(comparison.exploits for comparison in comparisons)
    assert_equal_populations(one.path, other.path)


@pytest.mark.parametrize("changes", [{}, OFF_POLICY])
def test_member_goes_on_with_copied_weights_and_its_own_environments(changes: dict[str, Any]) -> None:
    group = train(checkpoint_every=96, keep_checkpoints=100, **changes)
    comparison = next(each for each in read_comparisons(group.path) if each.exploits)
    (exploit,) = comparison.exploits
    ours, theirs = (
        load_checkpoint(group.path / name / f"checkpoints/step-{comparison.step:012d}.pt")
        for name in (exploit.member, exploit.source)
    )
    for part in ("policy", "optimiser"):
        assert_same(ours["algo"][part], theirs["algo"][part])
    with pytest.raises(AssertionError):
        assert_same(ours["collector"], theirs["collector"])
    learned = yaml.safe_load(ours["settings"])
    assert {name: learned[name] for name in exploit.after} == exploit.after
    assert exploit.before != exploit.after
    scores = comparison.scores
    assert scores[exploit.member] == min(scores.values())
    assert scores[exploit.source] == max(scores.values())
    for name, score in scores.items():
        records = unidle.load(group.path / name).records
        (evaluation,) = [r for r in records if r["kind"] == "evaluation" and r["step"] == comparison.step]
        assert evaluation["eval/return_mean"] == score


def test_member_that_is_never_replaced_equals_the_run_alone() -> None:
    group = train()
    replaced = {each.member for comparison in read_comparisons(group.path) for each in comparison.exploits}
    kept = [run for run in group.runs if run.path.name not in replaced]
    assert kept
    for run in kept:
        recipe = run.config.recipe
        settings = {name: getattr(recipe, name) for name in SPACE}
        alone = unidle.train("CartPole-v1", seed=run.config.run.seed, quiet=True, **{**SETTINGS, **settings})
        assert_same(final_state(run.path)["algo"], final_state(alone.path)["algo"])


def command(name: str) -> list[str]:
    Path("space.yaml").write_text(yaml.safe_dump(SPACE))
    flags = ["train", "CartPole-v1", "--seeds", "4", "--pbt", "--space", "space.yaml", "--run-name", name]
    for setting, value in SETTINGS.items():
        if setting == "tensorboard":
            flags.append("--no-tensorboard")
        elif setting == "net_arch":
            flags += ["--net-arch", "8"]
        else:
            flags += [f"--{setting.replace('_', '-')}", str(value)]
    return flags


def test_population_killed_and_interrupted_continues_equal() -> None:
    start = [*command("killed"), "--timesteps", "1920", "--checkpoint-every", "32", "--quiet"]
    for step, number, code in ((96, signal.SIGKILL, -9), (960, signal.SIGINT, 130)):
        process = subprocess.Popen([sys.executable, "-m", "unidle", *start], stderr=subprocess.PIPE)
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until:
            comparisons = read_comparisons(Path("runs/killed"))
            if comparisons and comparisons[-1].step >= step:
                process.send_signal(number)
                break
            time.sleep(0.002)
        assert process.wait() == code, process.stderr and process.stderr.read()
        start = ["train", "--resume", "runs/killed", "--quiet"]
    unidle.resume_population("runs/killed", quiet=True)
    whole = train("whole", timesteps=1920)
    assert any(comparison.exploits for comparison in read_comparisons(whole.path))
    assert_equal_populations(Path("runs/killed"), whole.path)


def test_kill_between_the_checkpoints_of_a_comparison_and_its_record_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("unidle.sweeps.population.write_comparisons", killed)
        with pytest.raises(KeyboardInterrupt, match="the last checkpoints are kept"):
            train("cut")
    assert read_comparisons(Path("runs/cut")) == []
    with monkeypatch.context() as patched:  # and after the checkpoint, before the config
        patched.setattr("unidle.engine.checkpoint.run_folder.RunFolder.save_config", killed)
        with pytest.raises(KeyboardInterrupt):
            unidle.resume_population("runs/cut", quiet=True)
    unidle.resume_population("runs/cut", quiet=True)
    assert_equal_populations(Path("runs/cut"), train("whole").path)


def test_command_trains_resumes_and_reports_a_population(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([*command("p"), "--json"]) == 0
    assert '"finished": 4' in capsys.readouterr().out
    events = read_comparisons(Path("runs/p"))
    page = Path("runs/p/report.html").read_text()
    assert "copied weights and perturbed settings" in page
    exploit = next(each for comparison in events for each in comparison.exploits)
    assert f"<td>{exploit.member}</td>" in page
    assert command_line(["train", "--resume", "runs/p", "--timesteps", "480", "--quiet"]) == 0
    assert read_comparisons(Path("runs/p"))[: len(events)] == events
    assert final_state(Path("runs/p/seed-3"))["step"] == 480
    with pytest.raises(unidle.UsageError, match=r"is a population; resume it with unidle\.resume_population"):
        unidle.resume_group("runs/p")


def test_member_that_cannot_be_built_again_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    new_member, calls = SharedProcess.new_member, []

    def fails_at_fifth(self: SharedProcess, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            raise unidle.UsageError("The networks need 9 GB, but 2 GB are free.")
        return new_member(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SharedProcess, "new_member", fails_at_fifth)
        with pytest.raises(
            unidle.TrainingError, match=r"1 of 4 runs in runs/p failed\.\nseed-\d: The networks need 9 GB"
        ):
            train()
    first = next(each for each in read_comparisons(Path("runs/p")) if each.exploits)
    (exploit,) = first.exploits
    for seed in range(4):
        is_failed = f"seed-{seed}" == exploit.member
        assert final_state(Path(f"runs/p/seed-{seed}"))["step"] == (first.step if is_failed else 384)
    assert unidle.resume_population("runs/p", quiet=True).summary()["finished"] == 4


def test_failed_member_leaves_the_others() -> None:
    """A learning rate of 1e30 makes the weights NaN."""
    with pytest.raises(unidle.TrainingError, match=r"of 4 runs in runs/p failed"):
        train(space={"learning_rate": [1e-3, 1e30]}, seeds=[0, 1, 2, 3])
    states = [final_state(Path(f"runs/p/seed-{seed}"))["step"] for seed in range(4)]
    assert 384 in states
    assert all(comparison.scores for comparison in read_comparisons(Path("runs/p")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 1}, "A population of 1 has nobody to copy; use --seeds 2 or more"),
        ({"eval_every": 0}, "A population is compared at its evaluations, but `eval_every` is 0"),
        ({"target_return": 100}, "A population trains to the end of its steps; remove --target-return"),
        ({"space": {"activation": ["tanh", "relu"]}}, "`activation` cannot change while a member trains"),
        ({"space": {"gama": [0.9]}}, "there is no setting `gama`; did you mean `gamma`?"),
    ],
)
def test_mistakes_are_refused_before_a_folder_is_created(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(unidle.UsageError, match=re.escape(message)):
        train(**changes)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pbt"], "--pbt trains a population; add its size, such as --seeds 8"),
        (["--space", "a.yaml"], "--space is for --pbt, and for `unidle sweep`; add --pbt, or remove it"),
        (["--pbt", "--seeds", "2", "--resume", "auto"], "--resume auto cannot continue a population"),
    ],
)
def test_flags_that_do_not_fit_get_one_sentence(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["train", "CartPole-v1", *flags]) == 2
    assert message in capsys.readouterr().err
