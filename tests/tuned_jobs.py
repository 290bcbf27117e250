"""A job to tune and its `JobSetup`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unidle.config import Config, PPORecipe
from unidle.config.validate import validated
from unidle.tuning.search.changes import Change
from unidle.tuning.search.trial import JobSetup

SITUATION = JobSetup(
    cores=4, gpu=None, on_gpu=False, on_device=False, vectorised=False, workers=1, slices=1, replay_off_device=False
)
JOB = validated(
    Config(PPORecipe(overlap="off")).with_values(
        {"env": "CartPole-v1", "n_envs": 8, "n_steps": 64, "batch_size": 64, "workers": 1}, "test"
    )
)


def change_texts(changes: list[Change]) -> list[str]:
    return [change.text for change in changes]


def with_engine(**values: Any) -> Config:
    return replace(JOB, engine=replace(JOB.engine, **values))
