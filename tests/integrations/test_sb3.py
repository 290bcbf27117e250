"""The callback for Stable-Baselines3, in real training."""

from __future__ import annotations

import threading
import time
from typing import Any

import gymnasium
import pytest

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402

from unidle.integrations.sb3 import ENVIRONMENT, LEARNING, ROLLOUT, IdleMeter  # noqa: E402
from unidle.meter.attribution.phases import PhaseMeter  # noqa: E402

_SLEPT_S = 0.01  # many times what SB3 itself needs for a step, even on cores that others use too


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        time.sleep(_SLEPT_S)
        return super().step(action)


def make() -> gymnasium.Env[Any, Any]:
    return Slow(gymnasium.make("CartPole-v1"))


class Logged(BaseCallback):  # type: ignore[misc]
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.names |= set(self.logger.name_to_value)


def test_a_slow_environment_is_the_largest_row_and_the_shares_sum_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = sb3.PPO("MlpPolicy", make(), n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    meter, logged = IdleMeter(), Logged()
    began = time.monotonic()
    model.learn(128, callback=[meter, logged])
    took = time.monotonic() - began
    seconds = {row.phase: row.seconds for row in meter.rows}
    shares = {row.phase: row.share for row in meter.rows}
    assert max(shares, key=lambda phase: shares[phase]) == ENVIRONMENT
    assert 128 * _SLEPT_S <= seconds[ENVIRONMENT] < sum(seconds.values()) <= took
    assert shares[ROLLOUT] > 0
    assert shares[LEARNING] > 0
    assert sum(shares.values()) == pytest.approx(1)
    assert {"idle/learning_share", "idle/rollout_environment_share"} <= logged.names
    assert ENVIRONMENT in capsys.readouterr().err


def test_the_environment_is_left_as_it_was_and_learning_can_go_on() -> None:
    model = sb3.DQN("MlpPolicy", make(), learning_starts=8, train_freq=4, device="cpu")
    for _ in range(2):
        meter = IdleMeter(quiet=True)
        model.learn(32, callback=meter, reset_num_timesteps=False)
        assert "step" not in vars(model.get_env())
        assert {row.phase for row in meter.rows} == {ENVIRONMENT, ROLLOUT, LEARNING, "unattributed"}


def test_the_table_is_not_made_anew_for_each_step_of_off_policy_training(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rows = PhaseMeter.rows
    monkeypatch.setattr(PhaseMeter, "rows", lambda meter: made.append(1) or rows(meter))
    model = sb3.DQN("MlpPolicy", "CartPole-v1", learning_starts=10**6, train_freq=1, device="cpu")
    logged = Logged()
    model.learn(500, callback=[IdleMeter(quiet=True), logged])
    assert len(made) < 10  # one at the first rollout, one at the end, and one in each few seconds
    assert "idle/learning_share" in logged.names


class Interrupted(BaseCallback):  # type: ignore[misc]
    def _on_step(self) -> bool:
        raise KeyboardInterrupt


@pytest.mark.parametrize("thread", [False, True])
def test_after_training_that_was_interrupted_the_next_is_measured(thread: bool) -> None:
    model = sb3.DQN("MlpPolicy", make(), learning_starts=8, train_freq=4, device="cpu")
    step = model.get_env().step

    def interrupt() -> None:
        with pytest.raises(KeyboardInterrupt):
            model.learn(32, callback=[IdleMeter(quiet=True), Interrupted()])

    if thread:
        other = threading.Thread(target=interrupt)
        other.start()
        other.join()
    else:
        interrupt()
    meter = IdleMeter(quiet=True)
    model.learn(32, callback=meter)
    assert {row.phase for row in meter.rows} == {ENVIRONMENT, ROLLOUT, LEARNING, "unattributed"}
    assert model.get_env().step == step


def test_a_step_that_somebody_else_put_there_stays() -> None:
    model = sb3.DQN("MlpPolicy", make(), learning_starts=8, train_freq=4, device="cpu")
    env = model.get_env()
    theirs = env.step = lambda actions, step=env.step: step(actions)
    model.learn(16, callback=IdleMeter(quiet=True))
    assert env.step is theirs

    class Late(Logged):
        def _on_training_start(self) -> None:
            env.step = theirs

    model.learn(16, callback=[IdleMeter(quiet=True), Late()])
    assert env.step is theirs
