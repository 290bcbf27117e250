"""The pipeline model against iterations worked out by hand; `hand_made` says what they are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hand_made import profile

from unidle.config import Engine
from unidle.tuning.pipeline_model import iteration_seconds, overlap_speedup, predicted_speedup, stepping_at
from unidle.tuning.probes.profile import Pace, Profile, Stepping

NOW = Engine(workers=4, slices=2)


def seconds(measured: Profile, engine: Engine = NOW, overlap: str = "off") -> float:
    found = iteration_seconds(measured, engine, overlap)
    assert found is not None
    return found


def test_off_the_parts_add_up() -> None:
    assert seconds(profile(rest=0.5)) == pytest.approx(4.0 + 2.0 + 0.5)


def test_what_the_collector_took_more_than_the_model_says_stays() -> None:
    # The model says 40 ms a step, as many as bare stepping; it was measured at 45.
    slow = profile(collecting=4.5)
    assert seconds(slow) == pytest.approx(4.5 + 2.0)
    half = dataclasses.replace(NOW, workers=2)
    assert seconds(slow, half) == pytest.approx(8.0 + 0.5 + 2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4.0),  # collecting hides learning
        ({"pace": Pace(0.002, 5.0)}, 5.8),  # the thread that learns serves too: 5 s + 100 × 4 × 2 ms
        ({"on_gpu": True, "pace": Pace(0.002, 5.0)}, 5.0),  # a GPU learns by itself
        ({"rest": 0.5}, 4.5),  # and the rest is hidden by nothing
        ({"cores": 4}, (4 * 4.0 + 0.8 + 2.0) / 4),  # four workers' stepping, serving and learning share four cores
    ],
)
def test_strict_overlap_takes_as_long_as_what_takes_longest(changes: dict[str, Any], expected: float) -> None:
    assert seconds(profile(**changes), overlap="strict") == pytest.approx(expected)


def test_overlap_is_worth_what_it_hides() -> None:
    assert overlap_speedup(profile(), NOW) == pytest.approx(6.0 / 4.0)
    assert overlap_speedup(profile(overlap="strict"), NOW) == pytest.approx(4.0 / 6.0)


@pytest.mark.parametrize(
    ("workers", "cores", "on_core", "expected"),
    [
        (4, 4, 1.0, 4.0),  # as measured
        (2, 4, 1.0, 8.0),  # 8 environments each instead of 4
        (8, 4, 1.0, 4.0),  # 2 each, but two workers share a core
        (8, 4, 0.1, 2.0),  # those that wait need none
        (3, 4, 1.0, 6.0),  # one of the three has 6
        (0, 4, 1.0, 16.0),  # all by the trainer
        (32, 4, 0.1, 1.0),  # no more than one each
    ],
)
def test_stepping_scales_with_the_busiest_worker(workers: int, cores: int, on_core: float, expected: float) -> None:
    assert stepping_at(profile(cores=cores, on_core=on_core), workers) == pytest.approx(expected)


def test_what_was_measured_is_taken_rather_than_scaled() -> None:
    both = profile(stepping=(Stepping(4, 8, 4.0, 4.0), Stepping(1, 2, 20.0, 20.0)))
    assert stepping_at(both, 1) == 20.0
    assert stepping_at(both, 2) == pytest.approx(10.0)  # from the nearer of the two


def test_slices_hide_inference_and_without_them_it_adds_up() -> None:
    # Two slices of a worker: while one is served, the other is stepped. One: 40 ms + 1.5 × 10 ms.
    waits = profile(pace=Pace(0.01, 2.0))
    assert seconds(waits) == pytest.approx(4.0 + 2.0)
    assert seconds(waits, Engine(workers=4, slices=1)) == pytest.approx(4.0 + 1.5 + 2.0)


def test_one_server_bounds_what_many_workers_can_do() -> None:
    # A service takes 20 ms, and four make a round of 80 ms: twice the 40 ms that the workers need.
    bound = profile(pace=Pace(0.02, 2.0), collecting=8.0, cores=64)
    assert seconds(bound) == pytest.approx(8.0 + 2.0)
    assert seconds(bound, Engine(workers=8, slices=2)) == pytest.approx(8.0 + 2.0)


def test_quick_steps_on_a_cpu_are_served_together() -> None:
    # 16 steps of 20 µs, 80 µs on each of 4 workers; 120 with the wait for the last; then 100 µs of inference for all.
    here = Stepping(0, 1, 0.032, 0.032)
    quick = profile(step_seconds=2e-5, stepping=(Stepping(4, 4, 0.008, 0.012), here), pace=Pace(1e-4, 1.0))
    quick = dataclasses.replace(quick, collecting=0.022)
    assert seconds(quick, Engine(workers=4)) == pytest.approx(0.022 + 1.0)
    # With no workers: 16 × 20 µs.
    assert seconds(quick, Engine(subproc=False)) == pytest.approx(0.032 + 0.010 + 1.0)
    # Three workers: six environments on the busiest instead of four.
    assert seconds(quick, Engine(workers=3)) == pytest.approx(0.018 + 0.010 + 1.0)


def test_nothing_overlaps_with_environments_that_the_trainer_steps_itself() -> None:
    here = profile(step_seconds=1e-6, stepping=(Stepping(0, 1, 1.0, 1.0),), pace=Pace(0.005, 1.0), collecting=1.5)
    assert overlap_speedup(here, Engine(subproc=False)) == pytest.approx(1.0)


def test_on_a_cpu_notes_are_the_learning_threads_work_too() -> None:
    busy = profile(pace=Pace(0.002, 5.0), collecting=4.6)  # 0.6 s more than the model says
    assert seconds(busy, overlap="strict") == pytest.approx(5.0 + 0.8 + 0.6)


def test_more_workers_promise_what_they_save() -> None:
    few = profile(stepping=(Stepping(2, 4, 8.0, 8.0),), collecting=8.0)
    assert predicted_speedup(few, Engine(workers=2), Engine(workers=4)) == pytest.approx((8.0 + 2.0) / (4.0 + 2.0))


def test_threads_and_devices_are_predicted_where_they_were_measured() -> None:
    tried = profile(learning_by_threads=((4, 0.8),), other_device=Pace(0.002, 0.2))
    assert predicted_speedup(tried, NOW, dataclasses.replace(NOW, threads=4)) == pytest.approx(6.0 / 4.8)
    assert predicted_speedup(tried, NOW, dataclasses.replace(NOW, threads=2)) is None
    assert predicted_speedup(tried, NOW, dataclasses.replace(NOW, device="cuda")) == pytest.approx(6.0 / 4.2)
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, device="cuda")) is None
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, device="cpu")) == 1.0  # it is there already


def test_graphs_are_predicted_where_they_were_measured_and_mean_nothing_to_a_cpu() -> None:
    without = profile(on_gpu=True, graphs=False, graphed=Pace(0.002, 0.5))
    now, then = dataclasses.replace(NOW, graphs=False), NOW
    assert predicted_speedup(without, now, then) == pytest.approx(6.0 / 4.5)
    assert predicted_speedup(profile(on_gpu=True), then, now) is None
    assert predicted_speedup(profile(), then, now) == 1.0
    rollouts_too = profile(on_gpu=True, graphs=False, graphed=Pace(0.002, 0.5, collecting=3.5))
    assert predicted_speedup(rollouts_too, now, then) == pytest.approx(6.0 / 4.0)


@pytest.mark.parametrize("change", [{"pin_cores": True}, {"compile": True}, {"env_timeout": 1.0}])
def test_the_model_is_silent_about_what_it_does_not_follow(change: dict[str, Any]) -> None:
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, **change)) is None
    assert predicted_speedup(profile(), NOW, NOW) == 1.0


def test_the_model_is_silent_about_environments_that_it_cannot_divide() -> None:
    together = profile(fixed_workers=True, stepping=(Stepping(0, 1, 4.0, 4.0),))
    assert predicted_speedup(together, Engine(), Engine(workers=2)) is None
    assert predicted_speedup(profile(on_device=True, stepping=()), Engine(), Engine(workers=2)) is None
