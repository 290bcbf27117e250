"""Run folders with damaged, edited or planted files: intact files are used, and nothing loads as something else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import mutations
from resumed_runs import assert_same, final_state

import unidle
from unidle.cli.main import run as run_command
from unidle.config.files import load_yaml
from unidle.config.foreign.files import read_config
from unidle.config.validate import validated
from unidle.engine.checkpoint.checkpoint_file import DamagedCheckpointError, load_checkpoint, save_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.evaluate.best_policy import pending_evaluations
from unidle.engine.progress import Progress
from unidle.errors import UsageError
from unidle.metrics.jsonl import JsonlWriter, read_records
from unidle.report.page.report import write_report

OLD = Path(__file__).parent / "run_of_0_1_0" / "checkpoints" / "best.pt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with three checkpoints (steps 32, 48 and 64) and a best policy."""
    run = unidle.train(
        "CartPole-v1",
        n_envs=2,
        n_steps=8,
        net_arch=(8,),
        batch_size=16,
        n_epochs=1,
        timesteps=64,
        eval_every=32,
        eval_episodes=1,
        eval_workers=0,
        checkpoint_every=16,
        keep_checkpoints=3,
        device="cpu",
        subproc=False,
        runs_dir=str(tmp_path_factory.mktemp("runs")),
        run_name="run",
        quiet=True,
    )
    return run.path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def flip_bit(path: Path, share: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# -- damaged checkpoints ---------------------------------------------------------------------------------------------


def load_fuzzed(path: Path, sound: Path, **options: Any) -> int:
    """How many damaged copies of `sound` are refused; the others must load as the same."""
    state, refused = load_checkpoint(sound, **options), 0
    for what, content in mutations(sound.read_bytes()):
        path.write_bytes(content)
        try:
            assert_same(load_checkpoint(path, **options), state, what)
        except DamagedCheckpointError:
            refused += 1
    return refused


def test_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    sound = RunFolder.open(trained).saved()[-1]
    assert load_fuzzed(tmp_path / "x.pt", sound) == len(list(mutations(b"a test")))


def test_damaged_checkpoint_of_earlier_version_does_not_load_as_another(tmp_path: Path) -> None:
    assert load_fuzzed(tmp_path / "x.pt", OLD, policy_only=True) > 0


def test_checkpoint_without_its_checksum_is_refused(trained: Path, tmp_path: Path) -> None:
    content, path = RunFolder.open(trained).saved()[-1].read_bytes(), tmp_path / "x.pt"
    torch.save({"format": 2}, path)
    with pytest.raises(DamagedCheckpointError, match="its end is missing"):
        load_checkpoint(path)
    path.write_bytes(content[:-40])
    with pytest.raises(DamagedCheckpointError, match="its end is missing"):
        load_checkpoint(path)


def test_run_resumes_from_newest_sound_checkpoint_with_same_result(
    run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, second, third = reversed(RunFolder.open(run).saved())
    flip_bit(newest)
    flip_bit(second, 0.1)
    unidle.resume(run, quiet=True)
    said = capsys.readouterr().err
    assert said.count("damaged") == 2, "one sentence, and the new names"
    assert re.search(
        rf"{newest.name} and {second.name} in \S+: damaged, renamed to \*\.damaged; using {third.name}\.", said
    )
    assert_same(final_state(run), final_state(trained))
    assert {f"{newest.name}.damaged", f"{second.name}.damaged"} < set(checkpoints(run))
    assert RunFolder.open(run).saved() == [third, second, newest], "damaged files do not count as kept"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("not enough memory: you tried to allocate 9 bytes")])
def test_intact_checkpoint_is_not_called_damaged_when_memory_is_short(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    before = checkpoints(run)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)):
        unidle.resume(run, quiet=True)
    assert checkpoints(run) == before


def test_run_without_intact_checkpoint_is_refused_and_unchanged(run: Path) -> None:
    for path in RunFolder.open(run).saved():
        flip_bit(path)
    before = checkpoints(run)
    with pytest.raises(UsageError, match=r"^All checkpoints in \S+ are damaged; restore one from a backup, or start"):
        unidle.resume(run, quiet=True)
    assert checkpoints(run) == before


def test_evaluation_passes_over_damaged_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest, second, _ = reversed(RunFolder.open(run).saved())
    flip_bit(run / "checkpoints" / "best.pt")
    flip_bit(newest)
    before = checkpoints(run)
    assert run_command(["eval", str(run), "--episodes", "1"]) == 0
    said = capsys.readouterr()
    assert "with the policy of step 48" in said.out
    assert said.err.splitlines() == [
        f"{run / 'checkpoints' / name} is damaged; using {second.name} of step 48." for name in ("best.pt", newest.name)
    ]
    assert checkpoints(run) == before, "evaluating changes nothing in the run folder"
    for path in RunFolder.open(run).saved():
        flip_bit(path, 0.3)
    assert run_command(["eval", str(run)]) == 2
    assert "is not a checkpoint, or is damaged (its checksum does not match)" in capsys.readouterr().err


def test_failed_save_deletes_no_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = RunFolder.open(run), checkpoints(run)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(unidle.TrainingError, match="No space left on device"):
        folder.save({}, 80, keep=1)
    assert checkpoints(run) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_policy_with_non_finite_weights_is_not_used(run: Path, value: float) -> None:
    best = run / "checkpoints" / "best.pt"
    state = load_checkpoint(best)
    weights = state["algo"]["policy"]
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].view(-1)[0] = value
    save_checkpoint(best, state)
    with pytest.raises(UsageError, match=rf"best\.pt has NaN or infinite weights \({re.escape(name)}\); use another"):
        unidle.load(run).evaluate(1)


# -- edited and damaged settings -------------------------------------------------------------------------------------


def edit(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_recipe_edited_in_config_file_is_named_on_resume(run: Path) -> None:
    edit(run, "gamma: 0.99", "gamma: 0.5")
    edit(run, "seed: 0", "seed: 1")
    with pytest.raises(UsageError) as error:
        unidle.resume(run, quiet=True)
    assert str(error.value) == (
        f"{run / 'config.yaml'} was edited, but a resumed run keeps its recipe: `gamma` is 0.5, not 0.99, `seed` is 1, "
        "not 0; undo that, or start a new run."
    )


def test_recipe_edited_in_config_file_is_named_on_evaluation(run: Path) -> None:
    edit(run, "activation: tanh", "activation: relu")  # the weights fit, and act differently
    with pytest.raises(UsageError) as error:
        unidle.load(run).evaluate(1)
    assert str(error.value) == (
        f"{run / 'config.yaml'} was edited, but a policy keeps the recipe it was trained with: `activation` is 'relu', "
        "not 'tanh'; undo that."
    )
    (run / "checkpoints" / "best.pt").unlink()
    with pytest.raises(UsageError, match="`activation` is 'relu', not 'tanh'"):
        unidle.load(run).predict([0.0] * 4)


def test_run_can_be_evaluated_with_another_seed_in_config_file(run: Path) -> None:
    edit(run, "seed: 0", "seed: 1")
    assert unidle.load(run).evaluate(1).returns


def test_duration_may_be_edited_in_config_file(run: Path) -> None:
    edit(run, "timesteps: 64", "timesteps: 80")
    assert unidle.resume(run, quiet=True).summary()["step"] == 80


def test_damaged_config_file_is_one_sentence(run: Path) -> None:
    path = run / "config.yaml"
    for what, content in mutations(path.read_bytes(), is_text=True):
        path.write_bytes(content)
        for read in (load_yaml, read_config, lambda path: validated(load_yaml(path)), lambda path: write_report(run)):
            said = ""
            try:
                read(path)
            except UsageError as error:
                said = str(error)
            assert len(said) < 1000, what


# -- damaged metrics -------------------------------------------------------------------------------------------------


def test_damaged_metrics_do_not_block_anything(run: Path) -> None:
    path = run / "metrics.jsonl"
    sound = path.read_bytes()
    for what, content in mutations(sound, is_text=True):
        path.write_bytes(content)
        write_report(run)
        progress = Progress(step=64, best_step=32)
        pending_evaluations({"evaluations": [{"step": 32}, {"step": 64}]}, run, progress)
        unidle.load(run).summary()
        JsonlWriter(path, 64).close()
        steps = [record["step"] for record in read_records(path)]
        assert all(0 <= step <= 64 for step in steps), what
        assert all(json.loads(line)["step"] <= 64 for line in path.read_bytes().split(b"\n")[:-1]), what


@pytest.mark.parametrize("value", ["null", "NaN", "1e999", "9" * 400, '"12"'])
def test_evaluation_whose_record_is_damaged_is_repeated(run: Path, value: str) -> None:
    metrics = run / "metrics.jsonl"
    lines = [
        re.sub('(?<="eval/return_mean": )[^,}]+', value, line) if '"step": 64' in line else line
        for line in metrics.read_text().splitlines()
    ]
    metrics.write_text("\n".join(lines) + "\n")
    progress, pending = Progress(step=64), [{"step": 32}, {"step": 64}]
    assert pending_evaluations({"evaluations": pending}, run, progress)[0] == [{"step": 64}]
    assert progress.best_step == 32


def test_report_shows_text_that_is_not_unicode(run: Path) -> None:
    edit(run, "run_name: run", 'run_name: "\\ud800"')
    assert "\\ud800" in write_report(run).read_text()


def test_damaged_lines_are_counted_on_resume_and_in_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "meter.jsonl", "changes.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"null\n\xff\n" + b"[" * 100_000 + b"\n")
    assert run_command(["report", str(run)]) == 0
    assert capsys.readouterr().err == f"unidle: {run / 'metrics.jsonl'} has 3 damaged lines; skipped.\n"
    unidle.resume(run, timesteps=80, quiet=True)
    said = capsys.readouterr().err
    for name in ("metrics.jsonl", "meter.jsonl", "changes.jsonl"):
        assert said.count(f"{name} has 3 damaged lines; skipped.") == 1
        assert all(isinstance(json.loads(line), dict) for line in (run / name).read_bytes().splitlines())


# -- planted links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "meter.jsonl", "changes.jsonl", "report.html", "page_graph.json"])
def test_planted_link_is_replaced(run: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    unidle.resume(run, timesteps=80, quiet=True)
    assert target.read_text() == "mine"
    assert name == "page_graph.json" or not (run / name).is_symlink()


def test_config_file_is_not_written_through_link(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "config.yaml"
    (run / "config.yaml").rename(target)
    (run / "config.yaml").symlink_to(target)
    before = target.read_text()
    unidle.resume(run, timesteps=80, quiet=True)
    assert target.read_text() == before
    assert load_yaml(run / "config.yaml").run.timesteps == 80


@pytest.mark.parametrize("name", [".lock", "checkpoints", "tensorboard"])
@pytest.mark.parametrize("exists", [True, False])
def test_planted_link_is_refused(run: Path, tmp_path: Path, name: str, exists: bool) -> None:
    target = tmp_path / "target"
    if not exists:
        (run / name).unlink() if name == ".lock" else shutil.rmtree(run / name)
    else:
        (run / name).rename(target)
    (run / name).symlink_to(target)
    before = sorted(target.iterdir()) if target.is_dir() else None
    with pytest.raises(UsageError, match=rf"{re.escape(name)} is a link, .*; remove the link\.$"):
        unidle.resume(run, timesteps=80, quiet=True)
    assert target.exists() == exists
    assert (sorted(target.iterdir()) if target.is_dir() else None) == before
