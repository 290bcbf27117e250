"""The rewriting of Stable-Baselines3's tests, without downloading them."""

from __future__ import annotations

from sb3_suite import rewritten


def test_only_what_unidle_has_is_imported_from_it() -> None:
    text = """import os

from stable_baselines3 import (
    A2C,
    PPO,
)
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
"""
    assert rewritten(text).splitlines() == [
        "import os",
        "",
        "from stable_baselines3 import A2C",
        "from unidle.sb3 import PPO",
        "from unidle.sb3.common.vec_env import DummyVecEnv",
        "from stable_baselines3.common.vec_env import VecNormalize",
    ]
