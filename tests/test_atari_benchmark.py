"""benchmarks/atari.py: every side trains or steps with tiny settings, and the captured loop learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import atari
import numpy as np
import pytest
import torch
from captured_ppo import Recipe, train
from gymnasium import spaces

TINY = ["--n-envs", "2", "--n-steps", "8", "--batch-size", "8", "--n-epochs", "1", "--seconds", "0"]


@pytest.mark.parametrize("side", [side for side in atari.SIDES if side != "envpool"])
def test_side_reports_its_speed(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    measured = atari.measure(side, atari.parser().parse_args([*TINY, "--seconds", "0.01"]))
    assert measured["steps_per_second"] > 0


def test_run_alternates_and_saves_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("ale_py")
    order = []

    def run(side: str, flags: list[str]) -> dict[str, float]:
        order.append(side)
        return {"steps_per_second": 100.0 * len(order)}

    monkeypatch.setattr(atari, "_run_in_subprocess", run)
    monkeypatch.setattr("sys.argv", ["atari.py", *TINY, "--sides", "bare", "sb3", "strict", "--out", str(tmp_path)])
    atari.main()
    assert order == ["bare", "sb3", "strict", "strict", "sb3", "bare"]
    saved = json.loads((tmp_path / "atari.json").read_text())
    assert saved["n_envs"] == 2
    assert saved["sides"]["strict"]["steps_per_second"] == 350.0
    assert [run["steps_per_second"] for run in saved["sides"]["bare"]["runs"]] == [100.0, 600.0]
    table = capsys.readouterr().out.splitlines()
    assert table[3].split() == ["strict", "350", "1.00", "1.00", "–"]


class OneGoodAction:
    """Like an AtariVectorEnv; the second of three actions is rewarded, and every 10th step ends the episodes."""

    single_action_space = spaces.Discrete(3)

    def __init__(self, n_envs: int) -> None:
        self._frames, self._steps = np.full((n_envs, 4, 84, 84), 200, np.uint8), 0
        self.rewards: list[float] = []

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        return self._frames, {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self._steps += 1
        rewards, ended = (actions == 1).astype(np.int32), np.full(len(actions), self._steps % 10 == 0)
        self.rewards.append(float(rewards.mean()))
        return self._frames, rewards, ended, np.zeros_like(ended), {}


def test_captured_loop_learns() -> None:
    torch.manual_seed(0)
    env = OneGoodAction(4)
    train(env, Recipe(n_envs=4, n_steps=16, batch_size=32, n_epochs=4), lambda steps: steps >= 4 * 16 * 12)
    assert np.mean(env.rewards[:16]) < 0.6
    assert np.mean(env.rewards[-16:]) > 0.9
