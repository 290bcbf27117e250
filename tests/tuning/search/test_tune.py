"""The tuner's decisions, with trials of known speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tuned_jobs import JOB, SITUATION, with_engine

from unidle.cli.tune import tune_command
from unidle.config import Config, Engine
from unidle.errors import TrainingError
from unidle.tuning.search import compare as trials_compare
from unidle.tuning.search import tune as tuning
from unidle.tuning.search.changes import Change, engine_changes, recipe_changes
from unidle.tuning.search.interval import Interval
from unidle.tuning.search.outcomes import Outcome, Tuned
from unidle.tuning.search.trial import JobSetup, Segment, TrialError
from unidle.tuning.search.tune import tune


@dataclass
class TuningProgress:
    """Counts its calls; raises KeyboardInterrupt, as Ctrl-C does, after `stop_after` outcomes."""

    stop_after: int = 1000
    outcomes: int = 0
    looks: int = 0

    def on_stage(self, text: str) -> None:
        pass

    def on_start(self, tuned: Tuned) -> None:
        pass

    def on_interim_result(self, change: Change, measured: Interval, pairs: int) -> None:
        self.looks += 1

    def on_outcome(self, outcome: Outcome) -> None:
        self.outcomes += 1
        if self.outcomes == self.stop_after:
            raise KeyboardInterrupt


class FakeTrial:
    """Stands in for `Trial`, without a process: speed and gain follow from the settings."""

    turns: list[Engine] = []  # noqa: RUF012  # engine settings of each turn
    n_open = 0

    crashes_at = -1  # turn at which the running trial crashes
    restarts = True
    start_timeouts: dict[Engine, float] = {}  # noqa: RUF012  # by engine settings
    situation = SITUATION
    no_episodes = False

    def __init__(self, config: Config) -> None:
        self.config, self.is_alive = config, True
        FakeTrial.n_open += 1

    def start(self, patience: float) -> JobSetup:
        engine = self.config.engine
        FakeTrial.start_timeouts[engine] = patience
        if engine.graphs != JOB.engine.graphs or engine.device == "cuda":
            if patience < 70:
                raise TrialError("hang", f"no response for {patience:.0f} seconds")
            return replace(FakeTrial.situation, on_gpu=True, replay_off_device=engine.device == "cuda")
        if len(FakeTrial.turns) > FakeTrial.crashes_at >= 0 and not FakeTrial.restarts:
            raise TrialError("crash", "it no longer starts")
        if engine.threads == 2:
            raise TrialError("crash", "the process ended with signal 6")
        if (engine.workers or 0) >= 4:
            raise TrialError("memory", "the process was killed, probably because the system ran out of memory")
        return replace(FakeTrial.situation, workers=engine.workers or 1)

    def train_segment(self, seconds: float, patience: float) -> Segment:
        if len(FakeTrial.turns) == FakeTrial.crashes_at:
            self.is_alive, FakeTrial.crashes_at = False, FakeTrial.crashes_at if not FakeTrial.restarts else -1
            FakeTrial.turns.append(self.config.engine)
            raise TrialError("crash", "the process ended with signal 11")
        FakeTrial.turns.append(self.config.engine)
        engine, recipe = self.config.engine, self.config.recipe
        rate = 1e6 * (engine.workers or 1) * (0.5 if engine.pin_cores else 1.0)
        wobble = 1 + 0.001 * (len(FakeTrial.turns) % 3)
        gain = {"off": 1.0, "strict": 2.0}[recipe.overlap] * (0.5 if recipe.n_envs > 8 else 1.0)
        gained = None if FakeTrial.no_episodes else gain * seconds * wobble
        return Segment(round(0.01 * rate * wobble), 0.01, seconds, gained, 0.0)

    def profile(self, seconds: float, patience: float) -> None:
        raise TrialError("crash", "no probes here")

    def close(self) -> None:
        FakeTrial.n_open -= 1


@pytest.fixture
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTrial.turns, FakeTrial.n_open, FakeTrial.crashes_at, FakeTrial.restarts = [], 0, -1, True
    FakeTrial.start_timeouts, FakeTrial.situation, FakeTrial.no_episodes = {}, SITUATION, False
    monkeypatch.setattr(tuning, "Trial", FakeTrial)


def outcomes_of(tuned: Tuned) -> dict[str, Outcome]:
    return {outcome.change.text: outcome for outcome in tuned.outcomes}


@pytest.mark.usefixtures("fake_trials")
def test_faster_settings_are_kept_and_failures_recorded() -> None:
    tuned = tune(JOB, 60.0, TuningProgress())
    found = outcomes_of(tuned)
    assert tuned.ended_by == ""
    assert found["threads 1 → 2"].note == "crashed: the process ended with signal 6"
    assert found["workers 1 → 4"].note.startswith("out of memory: the process was killed")
    assert found["workers 1 → 2"].kept  # half of the four that failed
    assert found["workers 2 → 3"].kept
    assert not found["pin_cores auto → off"].kept
    assert tuned.config.engine == replace(JOB.engine, workers=3)
    assert tuned.config.recipe == JOB.recipe
    assert (tuned.first_rate, tuned.rate) == pytest.approx((1e6, 3e6), rel=0.01)
    measured = found["workers 2 → 3"].measured
    assert measured is not None
    assert measured.mean == pytest.approx(1.5, rel=0.01)
    assert FakeTrial.n_open == 0
    assert [text for text, outcome in found.items() if outcome.change.is_recipe] == []


@pytest.mark.usefixtures("fake_trials")
def test_compared_settings_alternate_in_abba_order() -> None:
    tune(JOB, 60.0, TuningProgress(stop_after=1))
    one, rival = FakeTrial.turns[0], FakeTrial.turns[2]
    assert rival != one
    assert FakeTrial.turns[1:7] == [one, rival, rival, one, one, rival]


@pytest.mark.usefixtures("fake_trials")
def test_ctrl_c_returns_the_outcomes_so_far() -> None:
    watcher = TuningProgress(stop_after=3)
    tuned = tune(JOB, 60.0, watcher)
    assert tuned.ended_by == "Ctrl-C"
    assert len(tuned.outcomes) == 3
    assert FakeTrial.n_open == 0


@pytest.mark.usefixtures("fake_trials")
@pytest.mark.parametrize("budget", [20.0, 60.0, 600.0])
def test_budget_is_exceeded_by_at_most_one_trial(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    start, train_segment = FakeTrial.start, FakeTrial.train_segment

    def slow_start(self: FakeTrial, patience: float) -> JobSetup:
        nonlocal now
        now += 5.0
        return start(self, patience)

    def slow_segment(self: FakeTrial, seconds: float, patience: float) -> Segment:
        nonlocal now
        now += 1.0
        return train_segment(self, seconds, patience)

    monkeypatch.setattr(FakeTrial, "start", slow_start)
    monkeypatch.setattr(FakeTrial, "train_segment", slow_segment)
    monkeypatch.setattr(tuning, "monotonic", lambda: now)
    monkeypatch.setattr(trials_compare, "monotonic", lambda: now)
    tuned = tune(JOB, budget, TuningProgress())
    assert now == tuned.seconds <= budget + 5
    assert tuned.outcomes
    assert tuned.ended_by == ("budget" if budget < 600 else "")


@pytest.mark.usefixtures("fake_trials")
@pytest.mark.parametrize("restarts", [True, False])
def test_failed_current_settings_are_restarted_or_end_tuning(restarts: bool) -> None:
    FakeTrial.crashes_at, FakeTrial.restarts = 1, restarts  # the first turn of the current settings in a comparison
    tuned = tune(JOB, 60.0, TuningProgress())
    first = tuned.outcomes[0]
    assert first.note == "the current settings failed at the same time, crashed: the process ended with signal 11"
    assert tuned.ended_by == ("" if restarts else "failure")
    assert tuned.config.engine.workers == (3 if restarts else 1)
    assert FakeTrial.n_open == 0


@pytest.mark.usefixtures("fake_trials")
def test_recipe_changes_are_judged_by_return_per_second() -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    tuned = tune(allowed, 600.0, TuningProgress())
    found = outcomes_of(tuned)
    assert found["overlap off → strict"].kept
    assert not found["n_envs 8 → 16"].kept
    measured = found["n_envs 8 → 16"].measured
    assert measured is not None
    assert measured.high < 0
    assert tuned.config.recipe == replace(JOB.recipe, overlap="strict")
    assert found["overlap off → strict"].plain()["judged_by"] == "return per second"


@pytest.mark.usefixtures("fake_trials")
def test_unmeasurable_current_recipe_is_tried_only_once() -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    learned: list[Config] = []
    tuner = tuning._Tuner(allowed, 600.0, TuningProgress())
    tuner._begin()
    gain = tuner._gain

    def recording_gain(config: Config, seed: int, seconds: float) -> float:
        learned.append(config)
        return gain(config, seed, seconds)

    tuner._gain = recording_gain  # type: ignore[method-assign]
    FakeTrial.no_episodes = True
    tuner._tune_recipe()
    tuner.close()
    assert learned == [allowed]
    notes = {outcome.note.split(":")[0] for outcome in tuner.tuned.outcomes}
    assert notes == {"the current settings cannot be measured"}
    assert len(tuner.tuned.outcomes) == len(recipe_changes(allowed, SITUATION))
    assert FakeTrial.n_open == 0


@pytest.mark.usefixtures("fake_trials")
def test_pending_engine_changes_are_not_tried_during_the_recipe_search(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = replace(JOB, run=replace(JOB.run, allow_recipe_change=True))
    monkeypatch.setattr(tuning, "engine_changes", lambda *_: [])
    tuner = tuning._Tuner(allowed, 600.0, TuningProgress())
    tuner._halved.append(Change((("workers", 2),), "workers 1 → 2"))
    monkeypatch.setattr(tuner, "_try", lambda change: setattr(tuner.tuned, "ended_by", "budget"))
    tuner.run()
    tuner.close()
    assert tuner.tuned.outcomes
    assert all(outcome.change.is_recipe for outcome in tuner.tuned.outcomes)


@pytest.mark.usefixtures("fake_trials")
@pytest.mark.parametrize(("budget", "kept"), [(600.0, True), (60.0, False)])
def test_trials_that_capture_or_compile_get_longer_to_start(budget: float, kept: bool) -> None:
    FakeTrial.situation = replace(SITUATION, gpu="NVIDIA H200", on_gpu=True)
    job = with_engine(graphs=not JOB.engine.graphs)
    tuner = tuning._Tuner(JOB, budget, TuningProgress())
    tuner._begin()
    tuner._try(Change((("graphs", job.engine.graphs),), "graphs"))
    tuner.close()
    (outcome,) = tuner.tuned.outcomes
    if kept:
        assert outcome.measured is not None
        assert 60 <= FakeTrial.start_timeouts[job.engine] <= 90
    else:
        assert outcome.note.startswith("not measured: it did not start within 30 seconds, half of the remaining time")
    tuner = tuning._Tuner(JOB, 600.0, TuningProgress())
    tuner._begin()
    tuner._try(Change((("workers", 2),), "workers 1 → 2"))
    tuner.close()
    assert FakeTrial.start_timeouts[with_engine(workers=2).engine] < 60


@pytest.mark.usefixtures("fake_trials")
def test_trials_with_replay_buffers_in_different_places_are_not_compared() -> None:
    FakeTrial.situation = replace(SITUATION, gpu="NVIDIA H200", on_gpu=True)
    tuner = tuning._Tuner(JOB, 600.0, TuningProgress())
    tuner._begin()
    tuner._try(Change((("device", "cuda"),), "device auto → cuda"))
    tuner.close()
    (outcome,) = tuner.tuned.outcomes
    assert outcome.note == "not measured: two replay buffers do not fit on the GPU"
    assert not outcome.kept


@pytest.mark.usefixtures("fake_trials")
def test_job_that_fails_with_current_settings_raises() -> None:
    with pytest.raises(
        TrainingError, match=r"^The job fails with its current settings, so it cannot be tuned: the process ended"
    ):
        tune(with_engine(threads=2), 60.0, TuningProgress())
    assert FakeTrial.n_open == 0


@pytest.mark.usefixtures("fake_trials")
def test_out_of_memory_job_error_says_what_to_reduce() -> None:
    with pytest.raises(TrainingError, match=r"ran out of memory; use fewer --n-envs.*--buffer-size\.$"):
        tune(with_engine(workers=4), 60.0, TuningProgress())


@pytest.mark.usefixtures("fake_trials")
def test_slow_predictions_are_skipped_and_the_best_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def predicted(profile: object, now: Engine, then: Engine) -> float | None:
        if then.slices != now.slices:
            return 0.5
        return {3: 3.0, 2: 2.0}.get(then.workers or 0)

    monkeypatch.setattr(FakeTrial, "profile", lambda *_: object())
    monkeypatch.setattr(tuning, "predicted_speedup", predicted)
    tuned = tune(JOB, 60.0, TuningProgress())
    found = outcomes_of(tuned)
    assert found["slices auto → 2"].note == "not tried"
    assert found["slices auto → 2"].predicted == 0.5
    assert next(text for text, outcome in found.items() if outcome.note != "not tried") == "workers 1 → 3"
    assert tuned.config.engine.workers == 3


@pytest.mark.usefixtures("fake_trials")
@pytest.mark.parametrize(("three", "first"), [(2.3, "workers 1 → auto"), (2.5, "workers 1 → 3")])
def test_default_is_tried_before_slightly_faster_predictions(
    three: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {None: 2.0, 3: three}
    monkeypatch.setattr(tuning, "predicted_speedup", lambda _, now, then: speeds.get(then.workers, 1.0))
    monkeypatch.setattr(FakeTrial, "profile", lambda *_: object())
    tuner = tuning._Tuner(JOB, 60.0, TuningProgress())
    tuner._probe()
    tuner._begin()
    change = tuner._next(engine_changes)
    tuner.close()
    assert change is not None
    assert change.text == first


@pytest.mark.usefixtures("fake_trials")
@pytest.mark.parametrize("measured", [True, False])
def test_existing_engine_file_is_replaced_only_after_a_measurement(
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
