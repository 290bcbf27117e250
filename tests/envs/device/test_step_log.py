"""The values that simulators log become means over a rollout."""

from __future__ import annotations

import pytest
import torch

from unidle.envs.device.step_log import StepLog


def test_each_value_is_averaged_over_the_steps_that_have_it() -> None:
    log = StepLog()
    log.add({"Episode_Reward/alive": torch.tensor(1.0), "terrain": 3})
    log.add({})
    log.add({"Episode_Reward/alive": torch.tensor(4.0), "per_env": torch.tensor([1.0, 2.0, 6.0])})
    assert log.take() == {"Episode_Reward/alive": 2.5, "Episode/terrain": 3.0, "Episode/per_env": 3.0}
    assert log.take() == {}


def test_a_dict_that_the_simulator_changes_later_keeps_its_values() -> None:
    log, shared = StepLog(), {"a/b": 1.0}
    log.add(shared)
    shared["a/b"] = 5.0
    log.add(shared)
    assert log.take() == {"a/b": 3.0}


@pytest.mark.parametrize("value", ["text", None, float("nan"), torch.tensor([])], ids=["text", "none", "nan", "empty"])
def test_values_other_than_finite_numbers_are_left_out(value: object) -> None:
    log = StepLog()
    log.add({"bad": value, "good": True})
    assert log.take() == {"Episode/good": 1.0}


def test_adding_a_step_does_not_read_its_tensors() -> None:
    log = StepLog()
    log.add({"a/b": torch.ones((), device="meta")})  # a meta tensor has no values
    with pytest.raises((RuntimeError, NotImplementedError)):
        log.take()
