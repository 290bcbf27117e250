"""Atari games of ale-py, stepped by its vector environment: `--env ale:breakout`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from unidle.config.machine import available_cores
from unidle.envs.make import EnvMaker
from unidle.envs.vector.adapters import GymnasiumVector, ObsBatch, VectorStep
from unidle.errors import UsageError

# Set by unidle, not in env_kwargs.
_SETTINGS = {
    "game": "the name after `ale:`",
    "num_envs": "n_envs",
    "batch_size": "slices",
    "autoreset_mode": "unidle itself",
}


# Whole games with the game's own rewards, however training splits and clips them.
_IN_EVALUATIONS = {"episodic_life": False, "life_loss_info": False, "reward_clipping": False}


def backend(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """The backend of `ale:` names; UsageError if ale-py has no such game."""
    game = name.partition(":")[2]
    try:
        ale_py = importlib.import_module("ale_py")
    except ImportError:
        raise UsageError(f"`{name}` needs the package ale-py; run: pip install 'unidle[atari]'.") from None
    if not hasattr(ale_py, "AtariVectorEnv"):
        raise UsageError(f"`{name}` needs a newer ale-py than {ale_py.__version__}; run: pip install 'ale-py>=0.12'.")
    games = importlib.import_module("ale_py.roms").get_all_rom_ids()
    if game not in games:
        near = difflib.get_close_matches(game.lower(), games, n=1)
        hint = f"did you mean `ale:{near[0]}`?" if near else "names are as in ale_py.roms, such as space_invaders."
        raise UsageError(f"ale-py has no game `{game}`; {hint}")
    for argument in kwargs.keys() & _SETTINGS.keys():
        raise UsageError(f"ale-py's `{argument}` is set by {_SETTINGS[argument]}; leave it out of env_kwargs.")

    def make(num_envs: int, num_threads: int = 0, reward_clipping: bool = True, **given: Any) -> Any:
        # Every vector environment may use all cores but one: ale-py would count those of the machine.
        threads = num_threads or min(num_envs, max(1, available_cores() - 1))
        settings = {**given, "num_threads": threads, "autoreset_mode": AutoresetMode.SAME_STEP}
        return ale_py.AtariVectorEnv(game, num_envs, reward_clipping=False, **settings)  # AleVector clips them

    return EnvMaker(name, make, kwargs, kind="native", native=AleVector, evaluation_kwargs=_IN_EVALUATIONS)


class AleVector(GymnasiumVector):
    """An `AtariVectorEnv` with AutoresetMode.SAME_STEP; rewards are clipped, episode returns are not."""

    def __init__(self, maker: EnvMaker, size: int) -> None:
        super().__init__(maker.create(num_envs=size), maker.name)
        self._clips_rewards = bool(maker.kwargs.get("reward_clipping", True))

    def reset(self, seeds: Sequence[int]) -> ObsBatch:
        """Reset all environments, each with its own seed."""
        observations, _ = self._env.reset(seed=np.array(seeds))
        return ObsBatch(self._env_ids, observations, lambda _: None)

    def send(self, actions: Any) -> None:
        """Start a step in ale-py's threads."""
        self._env.send(actions)

    def recv(self) -> VectorStep:
        """Finish the step."""
        step = self._step_from(self._env.recv())
        if self._clips_rewards:
            step.scores, step.rewards = step.rewards, np.clip(step.rewards, -1, 1)
        return step

    def close(self) -> None:
        """Close all environments and end ale-py's threads."""
        super().close()
        self._env.ale = None  # the threads end with it
