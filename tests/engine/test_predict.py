"""`TrainedRun.predict` on single observations and batches, as users of Stable-Baselines3 expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import unidle
from unidle.engine.predict import initial_state

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 1,
    "net_arch": (8,),
    "recurrent_size": 5,
    "timesteps": 32,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
    "subproc": False,
}
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (9, 9, 3), np.uint8),
        "body": spaces.Tuple((spaces.Box(-5, 5, (2, 2)), spaces.Discrete(4, start=3))),
        "lamps": spaces.MultiBinary(3),
    }
)
NESTED_ACTIONS = spaces.Dict(
    {
        "push": spaces.Box(-2.0, 4.0, (2,)),
        "gears": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 5]))),
    }
)


class Sampled(gymnasium.Env):
    """Random observations; the mask, if there is one, forbids the last action of MultiDiscrete([3, 2])."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, mask: str = "none") -> None:
        self.observation_space, self.action_space, self._mask = observation_space, action_space, mask

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, info = self.observe()
        return observation, 0.0, False, bool(self.np_random.random() < 0.1), info

    def observe(self) -> tuple[Any, dict]:
        return self.observation_space.sample(), {} if self._mask == "none" else {
            "action_mask": np.array([1, 1, 0, 0, 1])
        }


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(make: Callable[[], gymnasium.Env] | str, **settings: Any) -> unidle.TrainedRun:
    return unidle.train(make, **{**SMALL, **settings})


def batch_of(space: spaces.Space, samples: list[Any]) -> Any:
    """The samples as Gymnasium's vector environments return them."""
    out = gymnasium.vector.utils.create_empty_array(space, len(samples))
    return gymnasium.vector.utils.concatenate(space, samples, out)


def select(space: spaces.Space, batch: Any, index: int) -> Any:
    return list(gymnasium.vector.utils.iterate(gymnasium.vector.utils.batch_space(space, len_of(batch)), batch))[index]


def len_of(batch: Any) -> int:
    while isinstance(batch, (dict, tuple)):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [
        (BOX, spaces.Box(-2.0, 2.0, (2,), np.float64)),
        (BOX, spaces.Discrete(3, start=5)),
        (spaces.Discrete(7), spaces.MultiDiscrete([3, 2])),
        (spaces.Box(-1, 1, ()), spaces.MultiBinary(3)),
        (NESTED, NESTED_ACTIONS),
    ],
    ids=["Box", "Discrete actions", "Discrete observations", "scalar Box", "nested"],
)
def test_batch_gives_the_actions_of_its_observations(observation_space: Any, action_space: Any) -> None:
    run = trained(lambda: Sampled(observation_space, action_space), normalize_obs=True)
    observation_space.seed(1)
    samples = [observation_space.sample() for _ in range(6)]
    actions, state = run.predict(batch_of(observation_space, samples))
    assert state is None
    assert gymnasium.vector.utils.batch_space(action_space, 6).contains(actions)
    for index, sample in enumerate(samples):
        single, none = run.predict(sample)
        assert none is None
        assert action_space.contains(single)
        encode = run.agent.action_layout.encode
        np.testing.assert_allclose(encode(single), encode(select(action_space, actions, index)), atol=1e-5)


def test_batch_of_one_and_empty_batch_keep_the_batch_axis() -> None:
    run = trained("CartPole-v1")
    assert run.predict(np.zeros((1, 4)))[0].shape == (1,)
    assert run.predict(np.zeros((0, 4)))[0].shape == (0,)
    assert np.shape(run.predict(np.zeros(4))[0]) == ()


def test_sampled_actions_of_a_batch_differ() -> None:
    run = trained("Pendulum-v1")
    actions, _ = run.predict(np.tile([1.0, 0.0, 0.0], (50, 1)), deterministic=False)
    assert len(np.unique(actions)) > 25  # some are clipped
    same, _ = run.predict(np.tile([1.0, 0.0, 0.0], (50, 1)), None, None, True)
    np.testing.assert_allclose(same, same[[0]].repeat(50, 0), atol=1e-6)  # the last bits may depend on the row


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_state_is_returned_and_reset_by_episode_start(kind: str) -> None:
    run = trained("Pendulum-v1", recurrent=kind)
    observations = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)  # [step, env, number]
    agent, expected = run.agent, np.zeros((4, 3, 1), np.float32)
    starts = np.zeros((4, 3), np.bool_)
    starts[0], starts[2, 1] = True, True
    for env in range(3):
        for step in range(4):
            if starts[step, env]:
                agent.reset()
            expected[step, env] = agent.predict(observations[step, env])
    state = None
    for step in range(4):
        actions, state = run.predict(observations[step], state, starts[step])
        np.testing.assert_allclose(actions, expected[step], atol=1e-5)
        assert state is not None
        assert state.shape == (3, agent.policy.state_size)
    # one environment on its own, without episode_start
    _, single = run.predict(observations[0, 0])
    action, _ = run.predict(observations[1, 0], state=single)
    np.testing.assert_allclose(action, expected[1, 0], atol=1e-5)


def test_state_that_was_passed_is_not_changed() -> None:
    run = trained("Pendulum-v1", recurrent="gru")
    _, state = run.predict(np.ones((2, 3)))
    before = state.copy()
    first, _ = run.predict(np.ones((2, 3)), state, [True, False])
    again, _ = run.predict(np.ones((2, 3)), state, [True, False])
    assert np.array_equal(state, before)
    assert np.array_equal(first, again)


def test_masks_are_given_for_each_observation_or_found_in_them() -> None:
    actions = spaces.MultiDiscrete([3, 2])
    run = trained(lambda: Sampled(BOX, actions, "info"))
    masks = np.array([[1, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]])
    allowed = [[0, 1], [2, 0], [1, 1]]
    observations = np.random.default_rng(0).normal(size=(3, 3))
    for given in (masks, list(masks), (masks[:, :3], masks[:, 3:])):
        assert run.predict(observations, action_mask=given)[0].tolist() == allowed
    with pytest.raises(unidle.UsageError, match=r"^action_mask has 2 masks for 3 observations; pass one for each\.$"):
        run.predict(observations, action_mask=masks[:2])
    with pytest.raises(unidle.UsageError, match="pass action_mask=info"):
        run.predict(observations)
    space = spaces.Dict(x=BOX, action_mask=spaces.MultiBinary(5))
    run = trained(lambda: gymnasium.wrappers.TransformObservation(Sampled(space, actions), _with_mask, space))
    assert run.predict({"x": observations, "action_mask": masks})[0].tolist() == allowed


def _with_mask(observation: dict[str, Any]) -> dict[str, Any]:
    return {**observation, "action_mask": np.array([1, 1, 0, 0, 1], np.int8)}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"observation": np.zeros((2, 4))},
        r"its shape is \(2, 4\), not \(3,\), or \(batch, 3\) for a batch\)\.$",
    ),
    "two batch axes": ({"observation": np.zeros((2, 2, 3))}, r"its shape is \(2, 2, 3\), not"),
    "text": ({"observation": ["a", "b", "c"]}, r"^The observation does not fit the space Box"),
    "state": (
        {"observation": np.zeros((2, 3)), "state": np.zeros((3, 5))},
        r"^`state` has shape \(3, 5\), but this policy needs \(2, 5\); pass the state that predict returned for the "
        r"previous observations, or None\.$",
    ),
    "starts": (
        {"observation": np.zeros((2, 3)), "state": np.zeros((2, 5)), "episode_start": [True]},
        r"^`episode_start` has shape \(1,\), but the number of observations is 2; pass one value for each\.$",
    ),
}


def test_wrong_shapes_are_one_sentence() -> None:
    run = trained("Pendulum-v1", recurrent="gru")
    for arguments, message in WRONG.values():
        with pytest.raises(unidle.UsageError, match=message):
            run.predict(**arguments)


def test_parts_of_a_batch_must_have_the_same_length() -> None:
    run = trained(lambda: Sampled(spaces.Dict(a=BOX, b=BOX), spaces.Discrete(2)))
    for other in (np.zeros(3), np.zeros((3, 3))):
        with pytest.raises(unidle.UsageError, match="its parts are batches of different sizes"):
            run.predict({"a": np.zeros((2, 3)), "b": other})


def test_single_state_accepts_one_episode_start() -> None:
    for start in (True, [True], np.array([True])):
        assert not initial_state(np.ones(4), start, None, 4).any()  # type: ignore[arg-type]


def test_evaluate_policy_of_stable_baselines3_takes_a_run() -> None:
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    run = trained("CartPole-v1", recurrent="lstm")
    envs = vec_env.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    returns, lengths = evaluation.evaluate_policy(run, envs, 4, return_episode_rewards=True, warn=False)
    assert returns == lengths
    assert len(returns) == 4
