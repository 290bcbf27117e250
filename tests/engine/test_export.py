"""ONNX export: exported policies, run by onnxruntime, give the same actions as `predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from custom_networks import wide
from gymnasium import spaces

import unidle
from unidle.engine.agent import Agent
from unidle.engine.export import export_onnx

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 1,
    "net_arch": (8, 8),
    "recurrent_size": 6,
    "timesteps": 64,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
}
BOX_OBS = spaces.Box(-np.inf, np.inf, (3,), np.float64)
DICT_OBS = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (10, 9, 3), np.uint8),
        "body": spaces.Tuple((spaces.Box(-5, 5, (2, 2), np.float32), spaces.Discrete(4, start=3))),
        "dials": spaces.MultiDiscrete([3, 5]),
        "switches": spaces.MultiBinary(3),
    }
)
MULTI_DISCRETE = spaces.MultiDiscrete([3, 2, 4])
BOX_ACTIONS = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([4.0, 10.0], np.float32))


class Noise(gymnasium.Env):
    """Random observations from the space, with a larger range in the last dimension; optionally with action masks."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, mask_in: str = "none") -> None:
        self.observation_space, self.action_space, self._mask_in = observation_space, action_space, mask_in
        if mask_in == "observation":
            width = int(action_space.nvec.sum())
            self.observation_space = spaces.Dict({"state": observation_space, "action_mask": spaces.MultiBinary(width)})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, info = self.observe()
        return observation, 0.0, False, bool(self.np_random.random() < 0.1), info

    def observe(self) -> tuple[Any, dict]:
        observation = self.observation_space.sample()
        if isinstance(self.observation_space, spaces.Box):
            observation[-1] = 9 * observation[-1] + 20
        if self._mask_in == "observation":
            observation["action_mask"] = self.mask()
        return observation, {"action_mask": self.mask()} if self._mask_in == "info" else {}

    def mask(self) -> np.ndarray:
        """A random mask that always allows the first action of each component."""
        mask = self.np_random.integers(0, 2, int(self.action_space.nvec.sum())).astype(np.int8)
        mask[np.cumsum([0, *self.action_space.nvec[:-1]])] = 1
        return mask


def trained_agent(env: Any, **settings: Any) -> Agent:
    """A trained agent whose weights are large enough to give varied actions."""
    agent = unidle.train(env, **{**SMALL, **settings}).agent
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return agent


def onnx_inputs(observations: list[Any], agent: Agent) -> dict[str, np.ndarray]:
    """Observations as inputs of the exported policy, named as documented in docs/export.md."""
    feed = {}
    for leaf in agent.obs_layout.leaves:
        parts = observations
        for key in leaf.path:
            parts = [part[key] for part in parts]
        feed[".".join(["observation", *map(str, leaf.path)])] = np.stack(parts).astype(leaf.dtype)
    return feed


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def session(agent: Agent) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    exported = onnxruntime.InferenceSession(str(export_onnx(agent, Path("policy.onnx"))), options)
    assert {tensor.shape[0] for tensor in (*exported.get_inputs(), *exported.get_outputs())} == {"batch"}
    return exported


def assert_same_actions(
    agent: Agent, exported: onnxruntime.InferenceSession, env: Noise, mask_in: str = "none"
) -> None:
    env.reset(seed=3)
    samples = [env.observe() for _ in range(24)]
    observations = [observation for observation, _ in samples]
    feed = onnx_inputs(observations, agent)
    masks = [info.get("action_mask") for _, info in samples]
    if mask_in != "none":
        arrays = masks if mask_in == "info" else [observation["action_mask"] for observation in observations]
        feed["action_mask"] = np.stack(arrays).astype(np.uint8)
    assert {tensor.name for tensor in exported.get_inputs()} == feed.keys()
    predicted = [agent.predict(observation, action_mask=mask) for observation, mask in zip(observations, masks)]
    expected = np.stack([agent.action_layout.encode(action) for action in predicted])
    assert len(np.unique(expected, axis=0)) > 2  # otherwise equality proves little
    (actions,) = exported.run(["action"], feed)
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)
    (single,) = exported.run(["action"], {name: value[:1] for name, value in feed.items()})
    np.testing.assert_allclose(single, expected[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "settings"),
    [
        (BOX_OBS, BOX_ACTIONS, {"normalize_obs": True, "normalize_reward": True}),
        (BOX_OBS, BOX_ACTIONS, {"normalize_obs": True, "discretize": 5, "share_trunk": True}),
        (BOX_OBS, MULTI_DISCRETE, {"normalize_obs": True}),
        (DICT_OBS, spaces.Dict({"continuous": BOX_ACTIONS, "discrete": MULTI_DISCRETE}), {"normalize_obs": True}),
        (BOX_OBS, spaces.MultiBinary(4), {"network": wide}),
        (BOX_OBS, BOX_ACTIONS, {"net_arch": (), "critic_arch": (16, 4)}),
        (spaces.Discrete(5000, start=3), BOX_ACTIONS, {}),
        (BOX_OBS, BOX_ACTIONS, {"normalize_obs": True, "action_distribution": "squashed"}),
        (BOX_OBS, BOX_ACTIONS, {"normalize_obs": True, "action_distribution": "beta"}),
    ],
    ids=[
        "normalised Box to Box",
        "Box to bins",
        "Box to MultiDiscrete",
        "Dict with image to Dict",
        "custom network",
        "linear actor, larger critic",
        "embedded Discrete to Box",
        "squashed Box",
        "Beta-distributed Box",
    ],
)
def test_exported_policy_gives_same_actions_as_predict(
    observation_space: spaces.Space, action_space: spaces.Space, settings: dict[str, Any]
) -> None:
    def make() -> Noise:
        return Noise(observation_space, action_space)

    agent = trained_agent(make, **settings)
    assert_same_actions(agent, session(agent), make())


def test_exported_policy_includes_observation_normalisation() -> None:
    agent = trained_agent(lambda: Noise(BOX_OBS, BOX_ACTIONS), normalize_obs=True)
    far = np.array([[0, 0, 20], [0, 0, 1e6], [0, 0, 1e9]], np.float32)
    (actions,) = session(agent).run(["action"], {"observation": far})
    assert agent.policy.encoder.norm is not None
    assert 15 < agent.policy.encoder.norm.mean[2] < 25  # there is a mean to subtract
    assert not np.allclose(actions[0], actions[1], atol=1e-3)
    np.testing.assert_array_equal(actions[1], actions[2])  # both are clipped to ten standard deviations


@pytest.mark.parametrize("mask_in", ["info", "observation"])
def test_exported_policy_respects_action_mask(mask_in: str) -> None:
    def make() -> Noise:
        return Noise(BOX_OBS, MULTI_DISCRETE, mask_in)

    agent = trained_agent(make)
    exported = session(agent)
    assert_same_actions(agent, exported, make(), mask_in)
    names = {tensor.name for tensor in exported.get_inputs()}
    assert names == {"observation" if mask_in == "info" else "observation.state", "action_mask"}
    observations = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    only = np.tile(np.array([0, 1, 0, 0, 1, 0, 0, 0, 1], np.uint8), (50, 1))
    (actions,) = exported.run(["action"], {(names - {"action_mask"}).pop(): observations, "action_mask": only})
    assert (actions == [1, 1, 3]).all()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_exported_recurrent_policy_returns_next_state(kind: str) -> None:
    agent = trained_agent(lambda: Noise(BOX_OBS, BOX_ACTIONS), recurrent=kind, normalize_obs=True)
    exported = session(agent)
    observations = np.random.default_rng(0).normal(size=(6, 3, 3)).astype(np.float32)  # [step, episode, dimension]
    expected = []
    for episode in range(3):
        agent.reset()
        expected.append([agent.predict(observations[step, episode]) for step in range(6)])
    state = np.zeros((3, agent.policy.state_size), np.float32)
    for step in range(6):
        feed = {"observation": observations[step], "state": state}
        actions, state = exported.run(["action", "next_state"], feed)
        np.testing.assert_allclose(actions, [episode[step] for episode in expected], rtol=1e-4, atol=1e-4)
    (without_state,) = exported.run(["action"], {"observation": observations[5], "state": np.zeros_like(state)})
    assert not np.allclose(without_state, [episode[5] for episode in expected], atol=1e-3)


def test_missing_onnx_package_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = trained_agent(lambda: Noise(BOX_OBS, BOX_ACTIONS))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(unidle.UsageError, match=r"pip install 'unidle\[onnx\]'"):
        export_onnx(agent, Path("policy.onnx"))
    assert not Path("policy.onnx").exists()
