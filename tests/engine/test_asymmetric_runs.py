"""Training with asymmetric observations: actor and critic see different groups."""

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
    """The actor sees the target; only the critic sees the bonus that every step of this episode pays."""

    observation_space = spaces.Dict({"policy": spaces.Box(-1, 1, (2,)), "privileged": spaces.Box(-5, 5, (1,))})
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.steps, self.bonus = 0, float(self.np_random.uniform(-5, 5))
        return self._observation(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.steps += 1
        reward = self.bonus - abs(float(action[0]) - 0.8 * float(self.target[0]))
        return self._observation(), reward, self.steps == 4, False, {}

    def _observation(self) -> dict[str, Any]:
        self.target = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"policy": self.target, "privileged": np.array([self.bonus], np.float32)}


SETTINGS = {"preset": "classic", "n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 2e-3, "gamma": 0.5}
GROUPS = {"actor_obs": ("policy",), "critic_obs": ("policy", "privileged")}


def test_critic_learns_from_privileged_observations_that_actor_lacks(tmp_path: Path) -> None:
    options = {**SETTINGS, "timesteps": 20_480, "runs_dir": str(tmp_path), "quiet": True, "eval_every": 0, "seed": 1}
    explained_variance = {}
    for name, groups in {
        "asymmetric": GROUPS,
        "symmetric": {"actor_obs": ("policy",), "critic_obs": ("policy",)},
    }.items():
        records: list[dict[str, Any]] = []
        callbacks = [lambda context, records=records: records.append(context.record)]
        run = unidle.train(Push, **options, **groups, run_name=name, after_iteration=callbacks)
        explained_variance[name] = float(np.mean([record["train/explained_variance"] for record in records[-5:]]))
        if name == "asymmetric":
            trained = run
    assert explained_variance["asymmetric"] > 0.9
    assert explained_variance["symmetric"] < 0.5  # the critic cannot know the bonus
    for x in (-0.8, 0.0, 0.8):
        action = trained.agent.predict({"policy": np.array([x, 0.3], np.float32)})
        assert action[0] == pytest.approx(0.8 * x, abs=0.2)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_resumed_run_equals_uninterrupted_run(recurrent: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, **GROUPS, "recurrent": recurrent, "recurrent_size": 8, "normalize_obs": True}
    settings |= {"runs_dir": str(tmp_path), "quiet": True, "eval_every": 0, "n_epochs": 2}
    uninterrupted = unidle.train(Push, **settings, timesteps=2048, run_name="uninterrupted")
    unidle.train(Push, **settings, timesteps=1024, run_name="resumed")
    resumed = unidle.resume(tmp_path / "resumed", env=Push, timesteps=2048, quiet=True)
    for (name, expected), (_, actual) in zip(
        uninterrupted.agent.policy.state_dict().items(), resumed.agent.policy.state_dict().items()
    ):
        assert expected.equal(actual), name


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_loaded_and_exported_policies_need_only_actor_observations(recurrent: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    settings = {**SETTINGS, **GROUPS, "recurrent": recurrent, "recurrent_size": 8, "normalize_obs": True, "n_epochs": 2}
    unidle.train(Push, **settings, timesteps=1024, runs_dir=str(tmp_path), run_name="run", quiet=True)
    run = unidle.load(tmp_path / "run")
    session = onnxruntime.InferenceSession(export_onnx(run.agent, tmp_path / "policy.onnx"))
    assert [tensor.name for tensor in session.get_inputs()] == [
        "observation.policy",
        *["state"] * (recurrent != "none"),
    ]
    state = np.zeros((1, 16), np.float32)
    for seed in range(4):
        observation = np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32)
        feed = {"observation.policy": observation[None]} | ({"state": state} if recurrent != "none" else {})
        action, *next_state = session.run(None, feed)
        state = next_state[0] if next_state else state
        np.testing.assert_allclose(action[0], run.agent.predict({"policy": observation}), rtol=1e-4, atol=1e-4)
    run.agent.reset()
    first, _ = run.predict({"policy": observation})
    run.agent.reset()
    assert run.predict({"policy": observation, "privileged": np.array([4.0], np.float32)})[0] == first


def test_unknown_observation_group_is_rejected_before_training(tmp_path: Path) -> None:
    with pytest.raises(unidle.UsageError, match="keys policy, privileged"):
        unidle.train(Push, **SETTINGS, critic_obs=("privilege",), runs_dir=str(tmp_path), quiet=True)
    assert not list(tmp_path.glob("*/checkpoints/*"))
