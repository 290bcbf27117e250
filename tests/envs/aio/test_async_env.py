"""Asynchronous environments as users write them: Gymnasium's signature, forgotten `async`, a service that is down."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.errors import TrainingError, UsageError


class Waiting:
    """Counts its steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    async def reset(self, seed: int) -> Any:
        self.seed = seed
        return np.zeros(1, np.float32), {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    async def close(self) -> None:
        pass


class AsGymnasium(Waiting):
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is not None
        return await super().reset(seed)


class PlainStep(Waiting):
    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


class PlainResetAndClose(Waiting):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def close(self) -> None:
        pass


class Unreachable(gymnasium.Env):
    observation_space, action_space = Waiting.observation_space, Waiting.action_space
    address = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        urllib.request.urlopen(self.address)


class AsyncUnreachable(Waiting):
    async def reset(self, seed: int) -> Any:
        await asyncio.open_connection("127.0.0.1", int(Unreachable.address.rpartition(":")[2]))


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))  # nobody listens, now or after it is closed
        monkeypatch.setattr(Unreachable, "address", f"http://127.0.0.1:{listening.getsockname()[1]}")


@pytest.mark.parametrize("kind", [Waiting, AsGymnasium])
def test_reset_may_have_gymnasiums_signature(kind: type) -> None:
    maker = env_maker(kind)
    envs = AsyncEnvs(maker, probe(maker), 2, 0)
    try:
        envs.start(np.zeros(2, np.int64))
        envs.send([0, 1])
        assert envs.recv(at_least=2, seconds=30) == [0, 1]
        assert envs.faults == []
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (PlainStep, "write step() as `async def`, like reset() and close()"),
        (PlainResetAndClose, "write reset() and close() as `async def`, like step()"),
    ],
)
@pytest.mark.parametrize("as_function", [False, True])
def test_half_asynchronous_env_is_told_what_to_change(kind: type, advice: str, as_function: bool) -> None:
    with pytest.raises(UsageError) as caught:
        probe(env_maker((lambda: kind()) if as_function else kind))
    assert advice in str(caught.value)


@pytest.mark.parametrize("kind", [Unreachable, AsyncUnreachable])
@pytest.mark.usefixtures("closed_port")
def test_service_that_is_down_is_one_sentence(kind: type) -> None:
    with pytest.raises(TrainingError) as caught:
        probe(env_maker(kind))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "it cannot connect (" in message
    assert message.endswith("; start the service, or check its address.")
