"""The changes that the tuner tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tuned_jobs import HERE, JOB, texts, with_engine

from unidle.tuning.search.changes import Change, engine_changes, halved, recipe_changes


def test_workers_slices_pinning_and_threads_are_tried_for_environments_in_workers() -> None:
    assert texts(engine_changes(JOB, HERE)) == [
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


def test_more_workers_than_cores_are_tried_but_never_more_than_environments() -> None:
    many = replace(HERE, workers=4)
    assert "workers 4 → 8" in texts(engine_changes(with_engine(workers=4), many))
    assert "workers 8 → 16" not in texts(engine_changes(with_engine(workers=8), replace(HERE, workers=8)))


def test_a_gpu_brings_graphs_and_the_other_device_and_no_threads() -> None:
    seen = replace(HERE, gpu="NVIDIA H200", on_gpu=True)
    found = texts(engine_changes(with_engine(graphs=False), seen))
    assert found[0] == "graphs off → on"
    assert "device auto → cpu" in found
    assert not any("threads" in text for text in found)


def test_environments_on_the_device_are_compiled_and_never_moved_to_processes() -> None:
    seen = replace(HERE, on_device=True, workers=0)
    assert texts(engine_changes(with_engine(workers=None, threads=4), seen)) == [
        "compile off → on",
        "threads 4 → 1",
        "threads 4 → 2",
    ]


def test_environments_in_the_trainers_process_may_get_workers() -> None:
    changes = engine_changes(with_engine(workers=None, subproc=False), replace(HERE, workers=0))
    assert texts(changes)[0] == "subproc off → on"
    assert changes[0].applied(with_engine(workers=None, subproc=False)).engine.subproc is True


def test_no_engine_change_touches_the_recipe_or_the_run() -> None:
    for change in engine_changes(JOB, HERE):
        after = change.applied(JOB)
        assert (after.recipe, after.run) == (JOB.recipe, JOB.run)
        assert after.engine != JOB.engine
        assert not change.is_recipe


def test_recipe_changes_are_overlap_and_doublings_that_are_sound() -> None:
    assert texts(recipe_changes(JOB, HERE)) == [
        "overlap off → strict",
        "n_envs 8 → 16",
        "n_steps 64 → 128",
        "batch_size 64 → 128",
        "n_epochs 10 → 20",
    ]
    whole = replace(JOB, recipe=replace(JOB.recipe, batch_size=512))  # twice that does not divide the total batch
    assert "batch_size 512 → 1024" not in texts(recipe_changes(whole, HERE))


@pytest.mark.parametrize(
    ("values", "half"),
    [({"workers": 8}, 4), ({"workers": None}, 2), ({"workers": 2}, None), ({"slices": 8}, 4), ({"graphs": True}, None)],
)
def test_half_of_what_was_too_much_is_tried_if_it_is_more_than_there_is(
    values: dict[str, Any], half: int | None
) -> None:
    found = halved(Change(tuple(values.items()), "?"), JOB, HERE)
    assert (found and dict(found.values)) == (half and {next(iter(values)): half})
