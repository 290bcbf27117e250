"""Whole runs in which actor and critic see different parts of the observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import unidle
from unidle.engine.export import export_onnx


class Push(gymnasium.Env):
    """The policy sees where it is; how much a good push is worth in this episode, only the critic."""

    observation_space = spaces.Dict({"policy": spaces.Box(-1, 1, (2,)), "privileged": spaces.Box(-5, 5, (1,))})
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.steps, self.worth = 0, float(self.np_random.uniform(-5, 5))
        return self._seen(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.steps += 1
        reward = self.worth - abs(float(action[0]) - 0.8 * float(self.where[0]))
        return self._seen(), reward, self.steps == 4, False, {}

    def _seen(self) -> dict[str, Any]:
        self.where = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"policy": self.where, "privileged": np.array([self.worth], np.float32)}


SETTINGS = {"preset": "classic", "n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 2e-3, "gamma": 0.5}
GROUPS = {"actor_obs": ("policy",), "critic_obs": ("policy", "privileged")}


def test_the_critic_learns_what_only_it_sees_and_the_actor_acts_without(tmp_path: Path) -> None:
    options = {**SETTINGS, "timesteps": 20_480, "runs_dir": str(tmp_path), "quiet": True, "eval_every": 0, "seed": 1}
    explained = {}
    for name, groups in {"asymmetric": GROUPS, "blind": {"actor_obs": ("policy",), "critic_obs": ("policy",)}}.items():
        records: list[dict[str, Any]] = []
        callbacks = [lambda moment, to=records: to.append(moment.record)]
        run = unidle.train(Push, **options, **groups, run_name=name, after_iteration=callbacks)
        explained[name] = float(np.mean([record["train/explained_variance"] for record in records[-5:]]))
        if name == "asymmetric":
            acted = run
    assert explained["asymmetric"] > 0.9
    assert explained["blind"] < 0.5  # it cannot know what an episode is worth
    for x in (-0.8, 0.0, 0.8):
        action = acted.predict({"policy": np.array([x, 0.3], np.float32)})
        assert action[0] == pytest.approx(0.8 * x, abs=0.2)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(recurrent: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, **GROUPS, "recurrent": recurrent, "recurrent_size": 8, "normalize_obs": True}
    settings |= {"runs_dir": str(tmp_path), "quiet": True, "eval_every": 0}
    whole = unidle.train(Push, **settings, timesteps=2048, run_name="whole")
    unidle.train(Push, **settings, timesteps=1024, run_name="parts")
    parts = unidle.resume(tmp_path / "parts", env=Push, timesteps=2048, quiet=True)
    for (name, one), (_, other) in zip(
        whole.agent.policy.state_dict().items(), parts.agent.policy.state_dict().items()
    ):
        assert one.equal(other), name


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_loaded_and_exported_policies_need_the_actors_part_only(recurrent: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    settings = {**SETTINGS, **GROUPS, "recurrent": recurrent, "recurrent_size": 8, "normalize_obs": True}
    unidle.train(Push, **settings, timesteps=1024, runs_dir=str(tmp_path), run_name="it", quiet=True)
    run = unidle.load(tmp_path / "it")
    session = onnxruntime.InferenceSession(export_onnx(run.agent, tmp_path / "policy.onnx"))
    assert [place.name for place in session.get_inputs()] == ["observation.policy", *["state"] * (recurrent != "none")]
    state = np.zeros((1, 16), np.float32)
    for seed in range(4):
        seen = np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32)
        feed = {"observation.policy": seen[None]} | ({"state": state} if recurrent != "none" else {})
        action, *after = session.run(None, feed)
        state = after[0] if after else state
        np.testing.assert_allclose(action[0], run.predict({"policy": seen}), rtol=1e-4, atol=1e-4)
    run.agent.reset()
    first = run.predict({"policy": seen})
    run.agent.reset()
    assert run.predict({"policy": seen, "privileged": np.array([4.0], np.float32)}) == first


def test_a_name_that_the_observation_does_not_have_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(unidle.UsageError, match="keys policy, privileged"):
        unidle.train(Push, **SETTINGS, critic_obs=("privilege",), runs_dir=str(tmp_path), quiet=True)
    assert not list(tmp_path.glob("*/checkpoints/*"))
