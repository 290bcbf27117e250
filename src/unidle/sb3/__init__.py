"""The interface of Stable-Baselines3 on unidle: `from unidle.sb3 import PPO` in place of its own, and the script runs.

Stable-Baselines3 itself is needed only for its wrappers around vector environments (VecNormalize …).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unidle.sb3.theirs import install_finder, name_of_theirs

if TYPE_CHECKING:
    from unidle.sb3.algorithms import DQN as DQN
    from unidle.sb3.algorithms import PPO as PPO
    from unidle.sb3.algorithms import SAC as SAC
    from unidle.sb3.algorithms import TD3 as TD3
    from unidle.sb3.common.callbacks import BaseCallback as BaseCallback
    from unidle.sb3.common.callbacks import CallbackList as CallbackList
    from unidle.sb3.common.callbacks import CheckpointCallback as CheckpointCallback
    from unidle.sb3.common.callbacks import EvalCallback as EvalCallback
    from unidle.sb3.common.callbacks import EveryNTimesteps as EveryNTimesteps
    from unidle.sb3.common.callbacks import LogEveryNTimesteps as LogEveryNTimesteps
    from unidle.sb3.common.callbacks import ProgressBarCallback as ProgressBarCallback
    from unidle.sb3.common.callbacks import StopTrainingOnMaxEpisodes as StopTrainingOnMaxEpisodes
    from unidle.sb3.common.callbacks import StopTrainingOnNoModelImprovement as StopTrainingOnNoModelImprovement
    from unidle.sb3.common.callbacks import StopTrainingOnRewardThreshold as StopTrainingOnRewardThreshold
    from unidle.sb3.common.env_util import make_vec_env as make_vec_env
    from unidle.sb3.common.evaluation import evaluate_policy as evaluate_policy
    from unidle.sb3.common.monitor import Monitor as Monitor
    from unidle.sb3.common.noise import NormalActionNoise as NormalActionNoise
    from unidle.sb3.common.vec_env import DummyVecEnv as DummyVecEnv
    from unidle.sb3.common.vec_env import SubprocVecEnv as SubprocVecEnv

# Imported on first use, as in `unidle`.
_NAMES = {
    "algorithms": ("PPO", "SAC", "TD3", "DQN"),
    "common.callbacks": (
        *("BaseCallback", "CallbackList", "CheckpointCallback", "EvalCallback", "EveryNTimesteps"),
        *("LogEveryNTimesteps", "ProgressBarCallback", "StopTrainingOnMaxEpisodes"),
        *("StopTrainingOnNoModelImprovement", "StopTrainingOnRewardThreshold"),
    ),
    "common.env_util": ("make_vec_env",),
    "common.evaluation": ("evaluate_policy",),
    "common.monitor": ("Monitor",),
    "common.noise": ("NormalActionNoise",),
    "common.vec_env": ("DummyVecEnv", "SubprocVecEnv", "VecNormalize", "VecFrameStack", "VecMonitor"),
}
_MODULES = {name: f"unidle.sb3.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    return name_of_theirs(__name__, name)


def __dir__() -> list[str]:
    return __all__


install_finder()
