"""A run without a folder writes nothing, and its state reaches whoever started it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_envs import Walk

from unidle.api import fit_to_env, start_without_folder
from unidle.config import Config
from unidle.config.presets import load_preset
from unidle.config.validate import validated
from unidle.engine.callbacks import CallbackContext, Callbacks
from unidle.envs.make import env_maker

SMALL = {"n_envs": 2, "n_steps": 16, "batch_size": 16, "n_epochs": 1, "net_arch": [8], "eval_every": 0}


def run(timesteps: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state at the end of a run, as copies."""
    maker = env_maker(Walk)
    config = load_preset("classic").apply(Config()).with_values({**SMALL, "timesteps": timesteps, "device": "cpu"}, "x")
    fitted, _ = fit_to_env(config.with_run(env=maker.name), maker)
    states: list[dict[str, Any]] = []

    def keep(context: CallbackContext) -> None:
        states.append(context.state())

    stopped_by = start_without_folder(
        validated(fitted, 16), maker, callbacks=Callbacks(on_end=[keep]), quiet=True, state=state
    )
    assert stopped_by is None
    return states[0]


def test_run_without_a_folder_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(64)["step"] == 64
    assert list(tmp_path.iterdir()) == []


def test_run_continues_from_a_state_as_if_it_had_not_ended() -> None:
    at_once = run(96)["algo"]["policy"]
    in_parts = run(96, run(64))["algo"]["policy"]
    assert all(torch.equal(at_once[name], in_parts[name]) for name in at_once)
