"""Whole runs over environments that fail: they go on, say what happened, and can be taken up again where they cannot."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_envs import IN_RESET, LONGEST, Broken, Echo, Once, Trial
from small_envs import counting_length
from test_resume import StopAfter, assert_same, final_state

import unidle
from unidle.engine.checkpoint import load_checkpoint
from unidle.envs.slot import episode_seed
from unidle.errors import TrainingError

SEED = 5
SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 4,
    "n_steps": 50,
    "batch_size": 100,
    "n_epochs": 2,
    "network_arch": (16,),
    "normalize_obs": True,
    "normalize_reward": True,
    "eval_every": 0,
    "tensorboard": False,
    "seed": SEED,
    "quiet": True,
}
HERE: dict[str, Any] = {"subproc": False}
WORKERS: dict[str, Any] = {"subproc": True, "workers": 2, "slices": 1}


def children() -> set[int]:
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in found}


def records(run: unidle.TrainedRun, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == kind]


def assert_goes_on(run: unidle.TrainedRun, timesteps: int, faults: dict[str, int], at: int) -> None:
    """All iterations are there, and count those faults from the one that ends at step `at` on."""
    iterations = records(run, "iteration")
    batch = run.config.recipe.total_batch
    assert [record["step"] for record in iterations] == list(range(batch, timesteps + 1, batch))
    assert final_state(run.path)["step"] == timesteps
    for record in iterations:
        told = {name.partition("/")[2]: n for name, n in record.items() if name.startswith("faults/")}
        assert told == (faults if record["step"] >= at else {})
        assert np.isfinite(record["train/loss" if "train/loss" in record else "train/value_loss"])
    assert iterations[-1]["rollout/episodes"] > iterations[-5]["rollout/episodes"]
    assert run.summary()["step"] == timesteps
    assert run.report.exists()


# -- one fault ---------------------------------------------------------------------------------------------------------

# Environment 2 does it in its 1001st step, the first of its episode 25: iteration 21, with four environments of 50 steps.
VICTIM, AFTER, TIMESTEPS, ITERATION = 2, 1000, 5000, 21
WHERE = f"episode 25 (seed {episode_seed(SEED, VICTIM, 25)}), step"
WORKER = "The worker of environments 2 to 3"
IN_HAND = f"environments 2 (episode 25, seed {episode_seed(SEED, 2, 25)}), 3 (episode 25, seed {episode_seed(SEED, 3, 25)})"


@pytest.mark.parametrize("overlap", ["off", "strict"])
@pytest.mark.parametrize(
    ("how", "engine", "kind", "says"),
    [
        ("raise", HERE, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "in step\n", "Traceback"]),
        ("raise", WORKERS, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "fault_envs.py"]),
        ("nan reward", HERE, "exception", [f"Environment 2 returned a NaN or infinite reward in {WHERE} 1."]),
        ("nan observation", WORKERS, "exception", [f"Environment 2 returned a NaN or infinite observation in {WHERE} 1."]),
        ("kill", WORKERS, "killed", [f"{WORKER} ended unexpectedly (exit status -9)", IN_HAND]),
        ("hang", WORKERS, "hung", [f"{WORKER} showed no sign of life for 1 seconds and was killed", IN_HAND]),
    ],
    ids=["raise", "raise in a worker", "nan reward", "nan observation in a worker", "kill", "hang"],
)
def test_a_run_survives_one_fault_and_says_what_it_was(
    how: str,
    engine: dict[str, Any],
    kind: str,
    says: list[str],
    overlap: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kwargs = {"how": how, "after": AFTER, "seed": episode_seed(SEED, VICTIM, 0)}
    run = unidle.train(
        Once,
        env_kwargs=kwargs,
        timesteps=TIMESTEPS,
        runs_dir=str(tmp_path),
        overlap=overlap,
        env_timeout=1.0,
        **SMALL,
        **engine,
    )
    (fault,) = records(run, "fault")
    assert fault.keys() == {"kind", "step", "env", "fault", "text"}
    assert (fault["env"], fault["fault"]) == (VICTIM, kind)
    # With overlap, that rollout was begun while the one before it was learned from.
    assert fault["step"] in ([(ITERATION - 1) * 200] if overlap == "off" else [(ITERATION - 2) * 200, (ITERATION - 1) * 200])
    for words in says:
        assert words in fault["text"]
    assert fault["text"].splitlines()[0] in capsys.readouterr().err
    assert_goes_on(run, TIMESTEPS, {kind: 1}, ITERATION * 200)
    assert not children()
