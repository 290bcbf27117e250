"""The pipeline model against iterations computed by hand; `job_facts` defines the profiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from job_facts import profile

from unidle.config import Engine
from unidle.tuning.pipeline_model import iteration_seconds, overlap_speedup, predicted_speedup, stepping_at
from unidle.tuning.probes.profile import Pace, Profile, Stepping

NOW = Engine(workers=4, slices=2)


def seconds(measured: Profile, engine: Engine = NOW, overlap: str = "off") -> float:
    found = iteration_seconds(measured, engine, overlap)
    assert found is not None
    return found


def test_without_overlap_the_parts_add_up() -> None:
    assert seconds(profile(rest=0.5)) == pytest.approx(4.0 + 2.0 + 0.5)


def test_unmodelled_collector_time_is_kept() -> None:
    # The model predicts 40 ms a step, the same as bare stepping; 45 ms were measured.
    slow = profile(collecting=4.5)
    assert seconds(slow) == pytest.approx(4.5 + 2.0)
    half = dataclasses.replace(NOW, workers=2)
    assert seconds(slow, half) == pytest.approx(8.0 + 0.5 + 2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4.0),  # collecting hides learning
        ({"pace": Pace(0.002, 5.0)}, 5.8),  # the learner thread also runs inference: 5 s + 100 × 4 × 2 ms
        ({"on_gpu": True, "pace": Pace(0.002, 5.0)}, 5.0),  # the GPU learns without the CPU
        ({"rest": 0.5}, 4.5),  # nothing hides the rest
        ({"cores": 4}, (4 * 4.0 + 0.8 + 2.0) / 4),  # stepping on four workers, inference and learning share four cores
    ],
)
def test_strict_overlap_takes_as_long_as_its_longest_part(changes: dict[str, Any], expected: float) -> None:
    assert seconds(profile(**changes), overlap="strict") == pytest.approx(expected)


def test_overlap_speedup_is_the_time_it_hides() -> None:
    assert overlap_speedup(profile(), NOW) == pytest.approx(6.0 / 4.0)
    assert overlap_speedup(profile(overlap="strict"), NOW) == pytest.approx(4.0 / 6.0)


@pytest.mark.parametrize(
    ("workers", "cores", "on_core", "expected"),
    [
        (4, 4, 1.0, 4.0),  # as measured
        (2, 4, 1.0, 8.0),  # 8 environments each instead of 4
        (8, 4, 1.0, 4.0),  # 2 each, but two workers share a core
        (8, 4, 0.1, 2.0),  # workers that wait need no core
        (3, 4, 1.0, 6.0),  # one of the three has 6
        (0, 4, 1.0, 16.0),  # the trainer steps all of them
        (32, 4, 0.1, 1.0),  # at most one worker per environment
    ],
)
def test_stepping_scales_with_the_busiest_worker(workers: int, cores: int, on_core: float, expected: float) -> None:
    assert stepping_at(profile(cores=cores, on_core=on_core), workers) == pytest.approx(expected)


def test_measured_stepping_is_preferred_over_scaling() -> None:
    both = profile(stepping=(Stepping(4, 8, 4.0, 4.0), Stepping(1, 2, 20.0, 20.0)))
    assert stepping_at(both, 1) == 20.0
    assert stepping_at(both, 2) == pytest.approx(10.0)  # scaled from the nearer of the two


def test_two_slices_hide_inference_and_one_does_not() -> None:
    # Two slices per worker: inference for one while the other steps. One slice: 40 ms + 1.5 × 10 ms.
    slow_inference = profile(pace=Pace(0.01, 2.0))
    assert seconds(slow_inference) == pytest.approx(4.0 + 2.0)
    assert seconds(slow_inference, Engine(workers=4, slices=1)) == pytest.approx(4.0 + 1.5 + 2.0)


def test_inference_bounds_the_speedup_of_more_workers() -> None:
    # An inference call takes 20 ms, and four make a round of 80 ms: twice the 40 ms that the workers need.
    bound = profile(pace=Pace(0.02, 2.0), collecting=8.0, cores=64)
    assert seconds(bound) == pytest.approx(8.0 + 2.0)
    assert seconds(bound, Engine(workers=8, slices=2)) == pytest.approx(8.0 + 2.0)


def test_fast_steps_on_a_cpu_share_one_inference_batch() -> None:
    # 16 steps of 20 µs, 80 µs on each of 4 workers; 120 with the wait for the last; then 100 µs of inference for all.
    trainer_only = Stepping(0, 1, 0.032, 0.032)
    fast_steps = profile(step_seconds=2e-5, stepping=(Stepping(4, 4, 0.008, 0.012), trainer_only), pace=Pace(1e-4, 1.0))
    fast_steps = dataclasses.replace(fast_steps, collecting=0.022)
    assert seconds(fast_steps, Engine(workers=4)) == pytest.approx(0.022 + 1.0)
    # With no workers: 16 × 20 µs.
    assert seconds(fast_steps, Engine(subproc=False)) == pytest.approx(0.032 + 0.010 + 1.0)
    # Three workers: six environments on the busiest instead of four.
    assert seconds(fast_steps, Engine(workers=3)) == pytest.approx(0.018 + 0.010 + 1.0)


def test_overlap_gains_nothing_if_the_trainer_steps_environments() -> None:
    in_trainer = profile(step_seconds=1e-6, stepping=(Stepping(0, 1, 1.0, 1.0),), pace=Pace(0.005, 1.0), collecting=1.5)
    assert overlap_speedup(in_trainer, Engine(subproc=False)) == pytest.approx(1.0)


def test_on_a_cpu_staging_adds_to_the_learner_thread() -> None:
    busy = profile(pace=Pace(0.002, 5.0), collecting=4.6)  # 0.6 s more than the model says
    assert seconds(busy, overlap="strict") == pytest.approx(5.0 + 0.8 + 0.6)


def test_predicted_speedup_of_more_workers() -> None:
    few = profile(stepping=(Stepping(2, 4, 8.0, 8.0),), collecting=8.0)
    assert predicted_speedup(few, Engine(workers=2), Engine(workers=4)) == pytest.approx((8.0 + 2.0) / (4.0 + 2.0))


def test_threads_and_devices_are_predicted_only_if_measured() -> None:
    measured = profile(learning_by_threads=((4, 0.8),), other_device=Pace(0.002, 0.2))
    assert predicted_speedup(measured, NOW, dataclasses.replace(NOW, threads=4)) == pytest.approx(6.0 / 4.8)
    assert predicted_speedup(measured, NOW, dataclasses.replace(NOW, threads=2)) is None
    assert predicted_speedup(measured, NOW, dataclasses.replace(NOW, device="cuda")) == pytest.approx(6.0 / 4.2)
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, device="cuda")) is None
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, device="cpu")) == 1.0  # already on the CPU


def test_graphs_are_predicted_if_measured_and_irrelevant_on_a_cpu() -> None:
    without = profile(on_gpu=True, graphs=False, graphed=Pace(0.002, 0.5))
    now, then = dataclasses.replace(NOW, graphs=False), NOW
    assert predicted_speedup(without, now, then) == pytest.approx(6.0 / 4.5)
    assert predicted_speedup(profile(on_gpu=True), then, now) is None
    assert predicted_speedup(profile(), then, now) == 1.0
    rollouts_too = profile(on_gpu=True, graphs=False, graphed=Pace(0.002, 0.5, collecting=3.5))
    assert predicted_speedup(rollouts_too, now, then) == pytest.approx(6.0 / 4.0)


@pytest.mark.parametrize("change", [{"pin_cores": True}, {"compile": True}, {"env_timeout": 1.0}])
def test_unmodelled_settings_have_no_prediction(change: dict[str, Any]) -> None:
    assert predicted_speedup(profile(), NOW, dataclasses.replace(NOW, **change)) is None
    assert predicted_speedup(profile(), NOW, NOW) == 1.0


def test_fixed_and_device_environments_have_no_prediction() -> None:
    in_lockstep = profile(fixed_workers=True, stepping=(Stepping(0, 1, 4.0, 4.0),))
    assert predicted_speedup(in_lockstep, Engine(), Engine(workers=2)) is None
    assert predicted_speedup(profile(on_device=True, stepping=()), Engine(), Engine(workers=2)) is None
