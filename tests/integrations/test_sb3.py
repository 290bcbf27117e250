"""IdleMeter, the callback for Stable-Baselines3, in real training."""

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

_STEP_SECONDS = 0.01  # many times SB3's own time per step, even on a busy machine


class SlowSteps(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        time.sleep(_STEP_SECONDS)
        return super().step(action)


def make_slow_env() -> gymnasium.Env[Any, Any]:
    return SlowSteps(gymnasium.make("CartPole-v1"))


class LoggedNames(BaseCallback):  # type: ignore[misc]
    """Collects the names of logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.names |= set(self.logger.name_to_value)


def test_slow_environment_has_largest_share(capsys: pytest.CaptureFixture[str]) -> None:
    model = sb3.PPO("MlpPolicy", make_slow_env(), n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    meter, logged = IdleMeter(), LoggedNames()
    start = time.monotonic()
    model.learn(128, callback=[meter, logged])
    elapsed = time.monotonic() - start
    seconds = {row.phase: row.seconds for row in meter.rows}
    shares = {row.phase: row.share for row in meter.rows}
    assert max(shares, key=lambda phase: shares[phase]) == ENVIRONMENT
    assert 128 * _STEP_SECONDS <= seconds[ENVIRONMENT] < sum(seconds.values()) <= elapsed
    assert shares[ROLLOUT] > 0
    assert shares[LEARNING] > 0
    assert sum(shares.values()) == pytest.approx(1)
    assert {"idle/learning_share", "idle/rollout_environment_share"} <= logged.names
    assert ENVIRONMENT in capsys.readouterr().err


def test_environment_is_restored_after_each_learn_call() -> None:
    model = sb3.DQN("MlpPolicy", make_slow_env(), learning_starts=8, train_freq=4, device="cpu")
    for _ in range(2):
        meter = IdleMeter(quiet=True)
        model.learn(32, callback=meter, reset_num_timesteps=False)
        assert "step" not in vars(model.get_env())
        assert {row.phase for row in meter.rows} == {ENVIRONMENT, ROLLOUT, LEARNING, "unattributed"}


def test_table_is_not_rebuilt_in_each_off_policy_step(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    rows = PhaseMeter.rows
    monkeypatch.setattr(PhaseMeter, "rows", lambda meter: builds.append(1) or rows(meter))
    model = sb3.DQN("MlpPolicy", "CartPole-v1", learning_starts=10**6, train_freq=1, device="cpu")
    logged = LoggedNames()
    model.learn(500, callback=[IdleMeter(quiet=True), logged])
    assert len(builds) < 10  # at the first rollout, at the end, and every few seconds
    assert "idle/learning_share" in logged.names


class Interrupted(BaseCallback):  # type: ignore[misc]
    def _on_step(self) -> bool:
        raise KeyboardInterrupt


@pytest.mark.parametrize("in_thread", [False, True])
def test_training_after_interrupted_training_is_measured(in_thread: bool) -> None:
    model = sb3.DQN("MlpPolicy", make_slow_env(), learning_starts=8, train_freq=4, device="cpu")
    step = model.get_env().step

    def interrupt() -> None:
        with pytest.raises(KeyboardInterrupt):
            model.learn(32, callback=[IdleMeter(quiet=True), Interrupted()])

    if in_thread:
        other = threading.Thread(target=interrupt)
        other.start()
        other.join()
    else:
        interrupt()
    meter = IdleMeter(quiet=True)
    model.learn(32, callback=meter)
    assert {row.phase for row in meter.rows} == {ENVIRONMENT, ROLLOUT, LEARNING, "unattributed"}
    assert model.get_env().step == step


def test_step_replaced_by_other_code_is_kept() -> None:
    model = sb3.DQN("MlpPolicy", make_slow_env(), learning_starts=8, train_freq=4, device="cpu")
    env = model.get_env()
    other_step = env.step = lambda actions, step=env.step: step(actions)
    model.learn(16, callback=IdleMeter(quiet=True))
    assert env.step is other_step

    class ReplacesStep(LoggedNames):
        def _on_training_start(self) -> None:
            env.step = other_step

    model.learn(16, callback=[IdleMeter(quiet=True), ReplacesStep()])
    assert env.step is other_step
