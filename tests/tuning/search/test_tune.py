"""The tuner's decisions, with trials of known speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tuned_jobs import HERE, JOB, with_engine

from unidle.cli.tune import tune_command
from unidle.config import Config, Engine
from unidle.errors import TrainingError
from unidle.tuning.search import compare as trials_compare
from unidle.tuning.search import tune as tuning
from unidle.tuning.search.changes import Change, engine_changes, recipe_changes
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned
from unidle.tuning.search.trial import Segment, Situation, TrialError
from unidle.tuning.search.tune import tune


@dataclass
class Watcher:
    """Notes what it is told; interrupts, as Ctrl-C does, after so many outcomes."""

    stop_after: int = 1000
    outcomes: int = 0
    looks: int = 0

    def on_stage(self, text: str) -> None:
        pass

    def on_start(self, tuned: Tuned) -> None:
        pass

    def on_look(self, change: Change, measured: Interval, pairs: int) -> None:
        self.looks += 1

    def on_outcome(self, outcome: Outcome) -> None:
        self.outcomes += 1
        if self.outcomes == self.stop_after:
            raise KeyboardInterrupt


class Known:
    """Stands in for `Trial`: its speed and gain follow from its settings, without a process."""

    order: list[Engine] = []  # noqa: RUF012  # whose turns they were
    open = 0

    dies_at = -1  # turn at which whoever has it dies
    runs_again = True
    patience: dict[Engine, float] = {}  # noqa: RUF012  # that its start was waited for
    seen = HERE
    no_episodes = False

    def __init__(self, config: Config) -> None:
        self.config, self.is_alive = config, True
        Known.open += 1

    def start(self, patience: float) -> Situation:
        engine = self.config.engine
        Known.patience[engine] = patience
        if engine.graphs != JOB.engine.graphs or engine.device == "cuda":
            if patience < 70:
                raise TrialError("hang", f"no response for {patience:.0f} seconds")
            return replace(Known.seen, on_gpu=True, replay_off_device=engine.device == "cuda")
        if len(Known.order) > Known.dies_at >= 0 and not Known.runs_again:
            raise TrialError("crash", "it does not start any more")
        if engine.threads == 2:
            raise TrialError("crash", "the process ended with signal 6")
        if (engine.workers or 0) >= 4:
            raise TrialError("memory", "the process was killed, probably because the system ran out of memory")
        return replace(Known.seen, workers=engine.workers or 1)

    def go(self, seconds: float, patience: float) -> Segment:
        if len(Known.order) == Known.dies_at:
            self.is_alive, Known.dies_at = False, Known.dies_at if not Known.runs_again else -1
            Known.order.append(self.config.engine)
            raise TrialError("crash", "the process ended with signal 11")
        Known.order.append(self.config.engine)
        engine, recipe = self.config.engine, self.config.recipe
        rate = 1e6 * (engine.workers or 1) * (0.5 if engine.pin_cores else 1.0)
        wobble = 1 + 0.001 * (len(Known.order) % 3)
        gain = {"off": 1.0, "strict": 2.0}[recipe.overlap] * (0.5 if recipe.n_envs > 8 else 1.0)
        gained = None if Known.no_episodes else gain * seconds * wobble
        return Segment(round(0.01 * rate * wobble), 0.01, seconds, gained, 0.0)

    def profile(self, seconds: float, patience: float) -> None:
        raise TrialError("crash", "no probes here")

    def close(self) -> None:
        Known.open -= 1


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    Known.order, Known.open, Known.dies_at, Known.runs_again = [], 0, -1, True
    Known.patience, Known.seen, Known.no_episodes = {}, HERE, False
    monkeypatch.setattr(tuning, "Trial", Known)


def outcomes_of(tuned: Tuned) -> dict[str, Outcome]:
    return {outcome.change.text: outcome for outcome in tuned.outcomes}


@pytest.mark.usefixtures("known")
def test_faster_settings_are_kept_one_by_one_and_failures_are_findings() -> None:
    tuned = tune(JOB, 60.0, Watcher())
    found = outcomes_of(tuned)
    assert tuned.ended_by == ""
    assert found["threads 1 → 2"].note == "crashed: the process ended with signal 6"
    assert found["workers 1 → 4"].note.startswith("out of memory: the process was killed")
    assert found["workers 1 → 2"].kept  # half of four
    assert found["workers 2 → 3"].kept
    assert not found["pin_cores auto → off"].kept
    assert tuned.config.engine == replace(JOB.engine, workers=3)
    assert tuned.config.recipe == JOB.recipe
    assert (tuned.first_rate, tuned.rate) == pytest.approx((1e6, 3e6), rel=0.01)
    measured = found["workers 2 → 3"].measured
    assert measured is not None
    assert measured.mean == pytest.approx(1.5, rel=0.01)
    assert Known.open == 0
    assert [text for text, outcome in found.items() if outcome.change.is_recipe] == []


@pytest.mark.usefixtures("known")
def test_the_sides_take_turns_forwards_and_backwards() -> None:
    tune(JOB, 60.0, Watcher(stop_after=1))
    one, rival = Known.order[0], Known.order[2]
    assert rival != one
    assert Known.order[1:7] == [one, rival, rival, one, one, rival]


@pytest.mark.usefixtures("known")
def test_ctrl_c_ends_with_what_is_known_by_then() -> None:
    watcher = Watcher(stop_after=3)
    tuned = tune(JOB, 60.0, watcher)
    assert tuned.ended_by == "Ctrl-C"
    assert len(tuned.outcomes) == 3
    assert Known.open == 0


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("budget", [20.0, 60.0, 600.0])
def test_the_budget_is_kept_to_but_for_the_trial_that_is_on(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    start, go = Known.start, Known.go

    def slow_start(self: Known, patience: float) -> Situation:
        nonlocal now
        now += 5.0
        return start(self, patience)

    def slow_go(self: Known, seconds: float, patience: float) -> Segment:
        nonlocal now
        now += 1.0
        return go(self, seconds, patience)

    monkeypatch.setattr(Known, "start", slow_start)
    monkeypatch.setattr(Known, "go", slow_go)
    monkeypatch.setattr(tuning, "monotonic", lambda: now)
    monkeypatch.setattr(trials_compare, "monotonic", lambda: now)
    tuned = tune(JOB, budget, Watcher())
    assert now == tuned.seconds <= budget + 5
    assert tuned.outcomes
    assert tuned.ended_by == ("budget" if budget < 600 else "")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("runs_again", [True, False])
def test_if_the_present_settings_fail_they_are_started_again_and_if_not_that_is_the_end(runs_again: bool) -> None:
    Known.dies_at, Known.runs_again = 1, runs_again  # the first turn of the present settings beside a change
    tuned = tune(JOB, 60.0, Watcher())
    first = tuned.outcomes[0]
    assert first.note == "the current settings failed at the same time, crashed: the process ended with signal 11"
    assert tuned.ended_by == ("" if runs_again else "failure")
    assert tuned.config.engine.workers == (3 if runs_again else 1)
    assert Known.open == 0


@pytest.mark.usefixtures("known")
def test_a_recipe_is_judged_by_the_return_gained_a_second_and_only_if_it_may_change() -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    tuned = tune(allowed, 600.0, Watcher())
    found = outcomes_of(tuned)
    assert found["overlap off → strict"].kept
    assert not found["n_envs 8 → 16"].kept
    measured = found["n_envs 8 → 16"].measured
    assert measured is not None
    assert measured.high < 0
    assert tuned.config.recipe == replace(JOB.recipe, overlap="strict")
    assert found["overlap off → strict"].plain()["judged_by"] == "return per second"


@pytest.mark.usefixtures("known")
def test_a_present_recipe_that_cannot_be_judged_is_tried_once_and_not_again_for_each_change() -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    learned: list[Config] = []
    tuner = tuning._Tuner(allowed, 600.0, Watcher())
    tuner._begin()
    gain = tuner._gain

    def noted(config: Config, seed: int, seconds: float) -> float:
        learned.append(config)
        return gain(config, seed, seconds)

    tuner._gain = noted  # type: ignore[method-assign]
    Known.no_episodes = True
    tuner._tune_recipe()
    tuner.close()
    assert learned == [allowed]
    notes = {outcome.note.split(":")[0] for outcome in tuner.tuned.outcomes}
    assert notes == {"the current settings cannot be measured"}
    assert len(tuner.tuned.outcomes) == len(recipe_changes(allowed, HERE))
    assert Known.open == 0


@pytest.mark.usefixtures("known")
def test_no_engine_change_is_left_for_the_time_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    monkeypatch.setattr(tuning, "engine_changes", lambda *_: [])
    tuner = tuning._Tuner(allowed, 600.0, Watcher())
    tuner._halves.append(Change((("workers", 2),), "workers 1 → 2"))
    monkeypatch.setattr(tuner, "_try", lambda change: setattr(tuner.tuned, "ended_by", "budget"))
    tuner.run()
    tuner.close()
    assert tuner.tuned.outcomes
    assert all(outcome.change.is_recipe for outcome in tuner.tuned.outcomes)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("budget", "kept"), [(600.0, True), (60.0, False)])
def test_what_captures_or_compiles_first_has_time_to_start(budget: float, kept: bool) -> None:
    Known.seen = replace(HERE, gpu="NVIDIA H200", on_gpu=True)
    job = with_engine(graphs=not JOB.engine.graphs)
    tuner = tuning._Tuner(JOB, budget, Watcher())
    tuner._begin()
    tuner._try(Change((("graphs", job.engine.graphs),), "graphs"))
    tuner.close()
    (outcome,) = tuner.tuned.outcomes
    if kept:
        assert outcome.measured is not None
        assert 60 <= Known.patience[job.engine] <= 90
    else:
        assert outcome.note.startswith("not measured: it did not start within 30 seconds, half of the remaining time")
    tuner = tuning._Tuner(JOB, 600.0, Watcher())
    tuner._begin()
    tuner._try(Change((("workers", 2),), "workers 1 → 2"))
    tuner.close()
    assert Known.patience[with_engine(workers=2).engine] < 60


@pytest.mark.usefixtures("known")
def test_two_that_keep_their_memory_in_different_places_are_not_compared() -> None:
    Known.seen = replace(HERE, gpu="NVIDIA H200", on_gpu=True)
    tuner = tuning._Tuner(JOB, 600.0, Watcher())
    tuner._begin()
    tuner._try(Change((("device", "cuda"),), "device auto → cuda"))
    tuner.close()
    (outcome,) = tuner.tuned.outcomes
    assert outcome.note == "not measured: two replay buffers do not fit on the GPU"
    assert not outcome.kept


@pytest.mark.usefixtures("known")
def test_a_job_that_does_not_run_as_it_is_cannot_be_tuned() -> None:
    with pytest.raises(
        TrainingError, match=r"^The job fails with its current settings, so it cannot be tuned: the process ended"
    ):
        tune(with_engine(threads=2), 60.0, Watcher())
    assert Known.open == 0


@pytest.mark.usefixtures("known")
def test_a_job_that_has_no_room_as_it_is_is_told_what_takes_less() -> None:
    with pytest.raises(TrainingError, match=r"ran out of memory; use fewer --n-envs.*--buffer-size\.$"):
        tune(with_engine(workers=4), 60.0, Watcher())


@pytest.mark.usefixtures("known")
def test_what_is_predicted_to_be_much_slower_is_not_tried_and_the_best_is_tried_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def predicted(profile: object, now: Engine, then: Engine) -> float | None:
        if then.slices != now.slices:
            return 0.5
        return {3: 3.0, 2: 2.0}.get(then.workers or 0)

    monkeypatch.setattr(Known, "profile", lambda *_: object())
    monkeypatch.setattr(tuning, "predicted_speedup", predicted)
    tuned = tune(JOB, 60.0, Watcher())
    found = outcomes_of(tuned)
    assert found["slices auto → 2"].note == "not tried"
    assert found["slices auto → 2"].predicted == 0.5
    assert next(text for text, outcome in found.items() if outcome.note != "not tried") == "workers 1 → 3"
    assert tuned.config.engine.workers == 3


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("three", "first"), [(2.3, "workers 1 → auto"), (2.5, "workers 1 → 3")])
def test_a_default_is_tried_before_what_is_predicted_to_be_a_little_faster(
    three: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {None: 2.0, 3: three}
    monkeypatch.setattr(tuning, "predicted_speedup", lambda _, now, then: speeds.get(then.workers, 1.0))
    monkeypatch.setattr(Known, "profile", lambda *_: object())
    tuner = tuning._Tuner(JOB, 60.0, Watcher())
    tuner._probe()
    tuner._begin()
    change = tuner._next(engine_changes)
    tuner.close()
    assert change is not None
    assert change.text == first


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("measured", [True, False])
def test_a_file_that_is_there_is_replaced_only_once_something_was_measured(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not measured:
        monkeypatch.setattr(tuning, "engine_changes", lambda *_: [])
    else:
        wanted = [Change((("workers", 2),), "workers 1 → 2")]
        monkeypatch.setattr(tuning, "engine_changes", lambda *_: wanted)
    Path("engine.yaml").write_text("mine")
    argv = ["--env", "CartPole-v1", "--preset", "classic", "--workers", "1", "--budget", "30s"]
    assert tune_command(argv) is None
    assert (Path("engine.yaml").read_text() != "mine") == measured
    assert ("train with" in capsys.readouterr().out) == measured
    assert tune_command([*argv, "--json"])["engine_file"] == ("engine.yaml" if measured else None)  # type: ignore[index]
