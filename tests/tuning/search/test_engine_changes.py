"""The engine and recipe changes that the tuner tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tuned_jobs import JOB, SITUATION, change_texts, with_engine

from unidle.tuning.search.changes import Change, engine_changes, halved, recipe_changes


def test_worker_environments_try_workers_slices_pinning_and_threads() -> None:
    assert change_texts(engine_changes(JOB, SITUATION)) == [
        "workers 1 → auto",
        "workers 1 → 4",
        "workers 1 → 3",
        "workers 1 → 2",
        "slices auto → 2",
        "slices auto → 4",
        "pin_cores auto → on",
        "workers 1 → in the trainer's process",
        "threads 1 → 2",
        "threads 1 → 4",
    ]


def test_workers_may_exceed_cores_but_not_environments() -> None:
    many = replace(SITUATION, workers=4)
    assert "workers 4 → 8" in change_texts(engine_changes(with_engine(workers=4), many))
    assert "workers 8 → 16" not in change_texts(engine_changes(with_engine(workers=8), replace(SITUATION, workers=8)))


def test_gpu_jobs_try_graphs_and_cpu_but_no_threads() -> None:
    setup = replace(SITUATION, gpu="NVIDIA H200", on_gpu=True)
    found = change_texts(engine_changes(with_engine(graphs=False), setup))
    assert found[0] == "graphs off → on"
    assert "device auto → cpu" in found
    assert not any("threads" in text for text in found)


def test_device_environments_try_compile_but_no_workers() -> None:
    setup = replace(SITUATION, on_device=True, workers=0)
    assert change_texts(engine_changes(with_engine(workers=None, threads=4), setup)) == [
        "compile off → on",
        "threads 4 → 1",
        "threads 4 → 2",
    ]


def test_serial_environments_try_worker_processes() -> None:
    changes = engine_changes(with_engine(workers=None, subproc=False), replace(SITUATION, workers=0))
    assert change_texts(changes)[0] == "subproc off → on"
    assert changes[0].applied(with_engine(workers=None, subproc=False)).engine.subproc is True


def test_vector_environments_may_get_processes_of_their_own() -> None:
    here = replace(SITUATION, vectorised=True, workers=0)
    assert "subproc auto → on" in change_texts(engine_changes(with_engine(workers=None), here))
    found = change_texts(engine_changes(with_engine(workers=None), replace(here, workers=2)))
    assert not any(text.startswith(("subproc", "workers", "pin_cores")) for text in found)
    assert "slices auto → 1" in found
    given = change_texts(engine_changes(with_engine(workers=2), replace(here, workers=2)))
    assert not any(text.startswith("slices") for text in given)  # which would contradict the number of workers


def test_engine_changes_keep_recipe_and_run() -> None:
    for change in engine_changes(JOB, SITUATION):
        after = change.applied(JOB)
        assert (after.recipe, after.run) == (JOB.recipe, JOB.run)
        assert after.engine != JOB.engine
        assert not change.is_recipe


def test_recipe_changes_are_overlap_and_valid_doublings() -> None:
    assert change_texts(recipe_changes(JOB, SITUATION)) == [
        "overlap off → strict",
        "n_envs 8 → 16",
        "n_steps 64 → 128",
        "batch_size 64 → 128",
        "n_epochs 10 → 20",
    ]
    whole = replace(JOB, recipe=replace(JOB.recipe, batch_size=512))  # twice that does not divide the total batch
    assert "batch_size 512 → 1024" not in change_texts(recipe_changes(whole, SITUATION))


@pytest.mark.parametrize(
    ("values", "half"),
    [({"workers": 8}, 4), ({"workers": None}, 2), ({"workers": 2}, None), ({"slices": 8}, 4), ({"graphs": True}, None)],
)
def test_halved_change_is_tried_if_above_the_current_value(values: dict[str, Any], half: int | None) -> None:
    found = halved(Change(tuple(values.items()), "?"), JOB, SITUATION)
    assert (found and dict(found.values)) == (half and {next(iter(values)): half})
