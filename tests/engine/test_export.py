"""A policy as ONNX, run by onnxruntime, against what `predict` says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from own_networks import wide

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
PLAIN = spaces.Box(-np.inf, np.inf, (3,), np.float64)
RICH = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (10, 9, 3), np.uint8),
        "body": spaces.Tuple((spaces.Box(-5, 5, (2, 2), np.float32), spaces.Discrete(4, start=3))),
        "dials": spaces.MultiDiscrete([3, 5]),
        "switches": spaces.MultiBinary(3),
    }
)
LEVERS = spaces.MultiDiscrete([3, 2, 4])
ARM = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([4.0, 10.0], np.float32))


class Noise(gymnasium.Env):
    """Observations drawn from the space, nine times as wide in the last number; a mask where `masked` says."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, masked: str = "no") -> None:
        self.observation_space, self.action_space, self._masked = observation_space, action_space, masked
        if masked == "in the observation":
            width = int(action_space.nvec.sum())
            self.observation_space = spaces.Dict({"it": observation_space, "action_mask": spaces.MultiBinary(width)})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, info = self.look()
        return observation, 0.0, False, bool(self.np_random.random() < 0.1), info

    def look(self) -> tuple[Any, dict]:
        observation = self.observation_space.sample()
        if isinstance(self.observation_space, spaces.Box):
            observation[-1] = 9 * observation[-1] + 20
        if self._masked == "in the observation":
            observation["action_mask"] = self.mask()
        return observation, {"action_mask": self.mask()} if self._masked == "in info" else {}

    def mask(self) -> np.ndarray:
        """Some of each head's actions, at least the first."""
        mask = self.np_random.integers(0, 2, int(self.action_space.nvec.sum())).astype(np.int8)
        mask[np.cumsum([0, *self.action_space.nvec[:-1]])] = 1
        return mask


def trained(env: Any, **settings: Any) -> Agent:
    """An agent whose weights are large enough that it takes all sorts of actions."""
    agent = unidle.train(env, **{**SMALL, **settings}).agent
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return agent


def leaves(observations: list[Any], agent: Agent) -> dict[str, np.ndarray]:
    """Observations as the inputs of the exported policy, one by its name for each part, as docs/export.md says."""
    feed = {}
    for leaf in agent.obs_layout.leaves:
        parts = observations
        for key in leaf.path:
            parts = [part[key] for part in parts]
        feed[".".join(["observation", *map(str, leaf.path)])] = np.stack(parts).astype(leaf.dtype)
    return feed


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def session(agent: Agent) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(export_onnx(agent, Path("policy.onnx"))), options)


def assert_same_actions(agent: Agent, exported: onnxruntime.InferenceSession, env: Noise, masked: str = "no") -> None:
    env.reset(seed=3)
    looks = [env.look() for _ in range(24)]
    observations = [observation for observation, _ in looks]
    feed = leaves(observations, agent)
    masks = [info.get("action_mask") for _, info in looks]
    if masked != "no":
        given = masks if masked == "in info" else [observation["action_mask"] for observation in observations]
        feed["action_mask"] = np.stack(given).astype(np.uint8)
    assert {place.name for place in exported.get_inputs()} == feed.keys()
    predicted = [agent.predict(seen, action_mask=mask) for seen, mask in zip(observations, masks)]
    expected = np.stack([agent.action_layout.encode(action) for action in predicted])
    assert len(np.unique(expected, axis=0)) > 2  # or it would be easy to agree
    (actions,) = exported.run(["action"], feed)
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)
    (alone,) = exported.run(["action"], {name: value[:1] for name, value in feed.items()})
    np.testing.assert_allclose(alone, expected[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "settings"),
    [
        (PLAIN, ARM, {"normalize_obs": True, "normalize_reward": True}),
        (PLAIN, ARM, {"normalize_obs": True, "discretize": 5, "share_trunk": True}),
        (PLAIN, LEVERS, {"normalize_obs": True}),
        (RICH, spaces.Dict({"how": ARM, "which": LEVERS}), {"normalize_obs": True}),
        (PLAIN, spaces.MultiBinary(4), {"network": wide}),
        (PLAIN, ARM, {"normalize_obs": True, "action_distribution": "squashed"}),
        (PLAIN, ARM, {"normalize_obs": True, "action_distribution": "beta"}),
    ],
    ids=[
        "normalised Box to Box",
        "Box to bins",
        "Box to MultiDiscrete",
        "Dict with image to Dict",
        "own network",
        "squashed Box",
        "Beta-distributed Box",
    ],
)
def test_an_exported_policy_acts_as_predict_does(
    observation_space: spaces.Space, action_space: spaces.Space, settings: dict[str, Any]
) -> None:
    def make() -> Noise:
        return Noise(observation_space, action_space)

    agent = trained(make, **settings)
    assert_same_actions(agent, session(agent), make())


def test_normalisers_are_inside() -> None:
    agent = trained(lambda: Noise(PLAIN, ARM), normalize_obs=True)
    far = np.array([[0, 0, 20], [0, 0, 1e6], [0, 0, 1e9]], np.float32)
    (actions,) = session(agent).run(["action"], {"observation": far})
    assert agent.policy.encoder.norm is not None
    assert 15 < agent.policy.encoder.norm.mean[2] < 25  # so that there was something to subtract
    assert not np.allclose(actions[0], actions[1], atol=1e-3)
    np.testing.assert_array_equal(actions[1], actions[2])  # both lie beyond the ten deviations that are kept


@pytest.mark.parametrize("masked", ["in info", "in the observation"])
def test_an_exported_policy_keeps_to_the_mask(masked: str) -> None:
    def make() -> Noise:
        return Noise(PLAIN, LEVERS, masked)

    agent = trained(make)
    exported = session(agent)
    assert_same_actions(agent, exported, make(), masked)
    names = {place.name for place in exported.get_inputs()}
    assert names == {"observation" if masked == "in info" else "observation.it", "action_mask"}
    seen = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    only = np.tile(np.array([0, 1, 0, 0, 1, 0, 0, 0, 1], np.uint8), (50, 1))
    (actions,) = exported.run(["action"], {(names - {"action_mask"}).pop(): seen, "action_mask": only})
    assert (actions == [1, 1, 3]).all()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_an_exported_recurrent_policy_hands_its_state_on(kind: str) -> None:
    agent = trained(lambda: Noise(PLAIN, ARM), recurrent=kind, normalize_obs=True)
    exported = session(agent)
    seen = np.random.default_rng(0).normal(size=(6, 3, 3)).astype(np.float32)  # [step, episode, number]
    expected = []
    for episode in range(3):
        agent.reset()
        expected.append([agent.predict(seen[step, episode]) for step in range(6)])
    state = np.zeros((3, agent.policy.state_size), np.float32)
    for step in range(6):
        feed = {"observation": seen[step], "state": state}
        actions, state = exported.run(["action", "next_state"], feed)
        np.testing.assert_allclose(actions, [episode[step] for episode in expected], rtol=1e-4, atol=1e-4)
    (forgetful,) = exported.run(["action"], {"observation": seen[5], "state": np.zeros_like(state)})
    assert not np.allclose(forgetful, [episode[5] for episode in expected], atol=1e-3)


def test_without_the_packages_the_sentence_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = trained(lambda: Noise(PLAIN, ARM))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(unidle.UsageError, match=r"pip install 'unidle\[onnx\]'"):
        export_onnx(agent, Path("policy.onnx"))
    assert not Path("policy.onnx").exists()
